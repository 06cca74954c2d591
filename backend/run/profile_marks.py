"""Removes the profiler marks from Dynamo's code for frames with Gossamer's graphs.

Dynamo's code for a frame makes two calls that mark its own work in profiles. Even without a profiler they take 5 to 10 µs.
"""

from gossamer.backend.report.graph_breaks import compiled_frame
from gossamer.runtime.torch_internals import off
from gossamer.runtime.torch_names import MARKS


def leave_out_profile_marks() -> None:
    """Makes Dynamo compile the current frame without marks. torch's setting is restored after that compilation or its
    failure."""
    if off(MARKS) or (frame := compiled_frame()) is None:
        return
    from gossamer.runtime.torch_internals import dynamo_config

    if dynamo_config.record_runtime_overhead:
        dynamo_config.record_runtime_overhead = False
        frame.output.add_cleanup_hook(_restore)


def _restore() -> None:
    from gossamer.runtime.torch_internals import dynamo_config

    dynamo_config.record_runtime_overhead = True
