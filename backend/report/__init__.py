"""The texts that users read and write: options, decisions, the report, dumps, warnings about graph breaks.

Graph passes make Decisions (report.py). `record` collects them, and table.py shows them.
"""
