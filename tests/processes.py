"""Processes of one machine that a test starts, joined by gloo."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import start_processes

_LOADED = [
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx", "gossamer.backend.compile_graph", "gossamer.backend.graph_passes",
    "gossamer.passes.pipelines", "gossamer.sparsity.training.fully_shard", "gossamer.sparsity.training.train_sparse",
    "pytest",
]  # fmt: skip


def in_processes(worker: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Calls worker(rank, *arguments) in so many processes, and raises what one of them raised.

    They are forked from one process that has loaded torch and Gossamer, and has run nothing. So each starts anew, but need not
    load these, which takes seconds.
    """
    multiprocessing.set_forkserver_preload(_LOADED)
    start_processes(worker, arguments, nprocs=ranks, start_method="forkserver")


def leave() -> None:
    """The last thing that such a process does, once all have come so far: it ends.

    Without the interpreter's own end, where threads of gloo that something still refers to are destroyed while they run, which
    now and then aborts the process ("terminate called without an active exception").
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
