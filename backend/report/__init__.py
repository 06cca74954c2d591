"""The texts that users read and write: options, decisions, the report, dumps, warnings about graph breaks."""
