"""Several ranks on this machine, for tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SILENT = 45  # seconds; others wait for 30 of them before they give up


def run_on_ranks(function, folder: Path, ranks: int, *arguments: Any, seconds: float = 60, dying: int = 0) -> list[Any]:
    """What `function(rank, ranks, *arguments)` returns on each of some ranks that talk through gloo; raises the first
    error. Forked, since importing torch anew takes longer than most tests; with a GPU autograd has threads, which must
    not be forked. The last `dying` of them never answer.
    """
    # What threads of earlier tests hold while a process is forked, a lock of MKL's say, nobody lets go of there.
    for thread in threading.enumerate():
        if thread.name.startswith("natgrad-"):
            thread.join(timeout=2)
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    queue = context.Queue()
    store = folder / f"store-{ranks}"
    common = (queue, function, str(store), ranks, arguments)
    processes = [context.Process(target=_rank, args=(rank, *common)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        answers = dict([queue.get(timeout=seconds) for _ in processes[: ranks - dying]])
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    for rank, (error, _) in sorted(answers.items()):
        if error:
            raise AssertionError(f"rank {rank} failed:\n{error}")
    return [answers[rank][1] for rank in range(ranks - dying)]


def _rank(rank: int, queue, function, store: str, ranks: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_SILENT)  # where a rank hangs, in what the test has written to stderr
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        dist.barrier()  # a rank that is done must not leave while others still come
        try:
            queue.put((rank, ("", function(rank, ranks, *arguments))))
        finally:
            dist.destroy_process_group()
    except BaseException:
        queue.put((rank, (traceback.format_exc(), None)))
    finally:
        faulthandler.cancel_dump_traceback_later()
