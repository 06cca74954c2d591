"""Dynamo's code for a frame marks in profiles what it does before it calls a graph. Two calls do so, profiler or not, and cost
5 to 10 us. Frames with graphs of ours have none.
"""

from gossamer.runtime.torch_internals import MARKS, off

_lowered = False


def leave_out_profile_marks() -> None:
    """Has the frame that Dynamo compiles now go without; torch's setting is what it was when that is done."""
    if off(MARKS):
        return
    from gossamer.runtime.torch_internals import CompileContext, dynamo_callbacks, dynamo_config

    global _lowered
    if dynamo_config.record_runtime_overhead and CompileContext.try_get() is not None:
        dynamo_config.record_runtime_overhead, _lowered = False, True
        if _restore not in dynamo_callbacks.end_callbacks:  # which torch.compiler.reset() empties
            dynamo_callbacks.register_end_callback(_restore)


def _restore(_: object) -> None:
    from gossamer.runtime.torch_internals import dynamo_config

    global _lowered
    if _lowered:
        dynamo_config.record_runtime_overhead, _lowered = True, False
