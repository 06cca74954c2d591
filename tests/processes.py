"""Processes of one machine that a test spawns, joined by gloo."""

import os

import torch.distributed as dist


def leave() -> None:
    """The last thing that such a process does, once all have come so far: it ends.

    Without the interpreter's own end, where threads of gloo that something still refers to are destroyed while they run, which
    now and then aborts the process ("terminate called without an active exception").
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
