"""The errors that Gossamer raises on purpose. All derive from `GossamerError`."""


class GossamerError(Exception):
    """The root of all errors that Gossamer raises on purpose. `except GossamerError` catches all of them."""


class OptionError(GossamerError, ValueError):
    """An argument, an option or a mode is unknown, or has a bad value."""


class FormatError(GossamerError, ValueError):
    """The text of a format cannot be read, or the data do not fit the format."""


class ArgumentError(GossamerError, RuntimeError):
    """The shapes, types or devices of an operation's tensors do not fit each other. torch raises a RuntimeError for them."""


class CompileError(GossamerError):
    """A region could not be compiled. The message names the stage, the reason, and the dump if there is one."""


class DeviceError(GossamerError):
    """A GPU or its driver is missing, is too old, or refused a kernel. The message quotes the driver."""


class IndexRangeError(ArgumentError, IndexError):
    """A table has no row, or a graph no node, with this index.

    torch raises a RuntimeError or an IndexError, depending on the operation.
    """
