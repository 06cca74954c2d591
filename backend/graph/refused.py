"""How the code that recognises patterns says that it leaves some nodes as they are, and why."""


class Refused(Exception):
    """The reason in words. The report appends it to a sentence."""
