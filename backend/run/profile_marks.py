"""Dynamo's code for a frame marks in profiles what it does before it calls a graph. Two calls do so, profiler or not, and cost
5 to 10 us. Frames with graphs of ours have none.
"""

from gossamer.backend.report.graph_breaks import compiled_frame
from gossamer.runtime.torch_internals import off
from gossamer.runtime.torch_names import MARKS


def leave_out_profile_marks() -> None:
    """Has the frame that Dynamo compiles now go without; torch's setting is what it was when that is done, or has failed."""
    if off(MARKS) or (frame := compiled_frame()) is None:
        return
    from gossamer.runtime.torch_internals import dynamo_config

    if dynamo_config.record_runtime_overhead:
        dynamo_config.record_runtime_overhead = False
        frame.output.add_cleanup_hook(_restore)


def _restore() -> None:
    from gossamer.runtime.torch_internals import dynamo_config

    dynamo_config.record_runtime_overhead = True
