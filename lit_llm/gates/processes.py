"""Run a function on several gloo ranks of this machine and get every rank's answer, or every rank's traceback."""

import faulthandler
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["RanksFailed", "run_ranks"]


class RanksFailed(RuntimeError):
    """At least one rank raised, died or did not finish in time. The message holds every rank's traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120.0,
    start_method: str = "spawn",
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in ``world_size`` processes that form a gloo group on the CPU.

    Each process computes with one torch thread. Answers travel through files, so they may hold tensors.

    Args:
        function: importable by the children (a function at the top of a module) unless ``start_method`` is "fork".
        world_size: how many processes.
        *arguments: picklable, passed to each.
        timeout: seconds until all processes are killed and :class:`RanksFailed` is raised.
        start_method: "spawn" or "fork". A fork is much faster, but would inherit a process group or a CUDA context
            that only its parent can use: where there is one, processes are spawned all the same.

    Returns:
        The answers, by rank.

    Raises:
        RanksFailed: with every rank's traceback, also of ranks that hung.
        ValueError: if ``world_size`` is smaller than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    inherits = (dist.is_available() and dist.is_initialized()) or torch.cuda.is_initialized()
    context: Any = mp.get_context("spawn" if inherits else start_method)
    with tempfile.TemporaryDirectory(prefix="lit-llm-ranks-") as folder:
        deadline = time.time() + timeout
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, deadline, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _join(processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return _collect(folder, world_size, [process.exitcode for process in processes])


def _join(processes: list[Any], timeout: float) -> None:
    """Wait for all, but only a moment longer once one has failed: the others may wait for it forever."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 5.0)
        time.sleep(0.02)


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    deadline: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # A forked child has its parent's objects but not its threads: computing with the parent's thread pool hangs, and so
    # does collecting a process group that the parent has left behind, whose end waits for its threads.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    hung = (Path(folder) / f"hung-{rank}").open("w")
    remaining = max(1.0, deadline - time.time())
    faulthandler.dump_traceback_later(remaining - 0.5, file=hung)
    try:
        # ranks meet in a file: a free port could be taken by somebody else before they use it
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=remaining),
        )
        torch.save(function(rank, *arguments), Path(folder) / f"answer-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _collect(folder: str, world_size: int, exit_codes: list[int | None]) -> list[Any]:
    if all(code == 0 for code in exit_codes):
        return [torch.load(Path(folder) / f"answer-{rank}", weights_only=False) for rank in range(world_size)]
    lines = []
    for rank, code in enumerate(exit_codes):
        lines.append(f"rank {rank} (exit code {code}):")
        files = [Path(folder) / f"{kind}-{rank}" for kind in ("error", "hung")]
        found = "".join(file.read_text() for file in files if file.exists())
        lines.append(found or "  no answer: killed while it waited for the others\n")
    raise RanksFailed("\n".join(lines))
