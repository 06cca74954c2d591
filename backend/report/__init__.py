"""What was asked for and what was decided, for people: options, decisions, the report, dumps."""
