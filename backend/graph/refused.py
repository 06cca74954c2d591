"""The answer of what recognises patterns where there is no operation of ours for what it was asked about."""


class Refused(Exception):
    """Says in words why something stays as it is, as the rest of a sentence in the report."""
