"""Every error that Gossamer raises on purpose, under one root."""


class GossamerError(Exception):
    """Root of all of them: `except GossamerError` catches whatever this package refuses."""


class OptionError(GossamerError, ValueError):
    """An option, a pass option or a mode that is unknown or has a bad value."""


class FormatError(GossamerError, ValueError):
    """A format that does not parse, or data that do not fit it."""


class ArgumentError(GossamerError, RuntimeError):
    """Tensors whose shapes, types or devices do not go together in an operation. torch has a RuntimeError for them."""


class CompileError(GossamerError):
    """A region could not be compiled; the message names the stage, the reason and the dump, if there is one."""


class DeviceError(GossamerError):
    """A GPU or its driver is missing, too old, or refused a kernel; the message has the driver's words."""


class IndexRangeError(ArgumentError, IndexError):
    """An index that a table has no row for. torch has a RuntimeError or an IndexError, as the operation is."""
