"""The exception by which code that recognises patterns says why it leaves some nodes as they are."""


class Refused(Exception):
    """The reason in words. The report appends it to a sentence."""
