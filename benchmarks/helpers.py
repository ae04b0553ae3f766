"""Figure 1 of the first paper, and what happens when its helpers die: kills them in turn, again and again.

    python -m benchmarks.helpers --kills 10

`torchrun --nproc-per-node 4 -m natgrad train digits --stats-workers 1 --inverse-workers 1` is run in peace, with the
stats worker and the inverse worker killed in turn, and without helpers, on the two ranks that train alone. It must come
to its end in all of them, without standing still, to the same quality. The story of the killed ones is what the run's
own log says.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from natgrad.training.metrics_file import read

GRADIENTS = 2
HELPERS = ["--stats-workers", "1", "--inverse-workers", "1"]
NAMES = {GRADIENTS: "stats worker", GRADIENTS + 1: "inverse worker"}
PATIENCE = 120.0  # seconds


@dataclass(frozen=True)
class Result:
    """How a run ended. `longest` is the longest time between two of its lines, in seconds."""

    accuracy: float
    loss: float
    seconds: float
    longest: float
    kills: int
    story: list[str]


def run(folder: Path, *, epochs: int, helpers: bool, kills: int, pause: float) -> Result:
    """One run from its beginning to its end."""
    processes = GRADIENTS + (len(NAMES) if helpers else 0)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "natgrad"]
    given = ["train", "digits", f"training.epochs={epochs}", "training.log_every=10", 'kfac.fisher="sampled"']
    given += ["training.batch=50", "kfac.factor_update_steps=5", "kfac.inv_update_steps=20", "--out", str(folder)]
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher, *given, *(HELPERS if helpers else [])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    killed = 0
    size, moved, longest, last = 0, time.monotonic(), 0.0, time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.02)
            now = time.monotonic()
            if (grown := _size(folder)) != size:
                longest = max(longest, now - moved) if size else 0.0
                size, moved = grown, now
            if now - moved > PATIENCE:
                raise RuntimeError(f"nothing for {PATIENCE:g} s: see {folder.with_suffix('.log')}")
            if killed < kills and size and now - last > pause:
                victim = _worker(process.pid, GRADIENTS + killed % len(NAMES))
                if victim is not None:
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                        killed += 1
                    last = now
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: see {folder.with_suffix('.log')}")
    lines = list(read(folder / "metrics.jsonl"))
    test = [line for line in lines if line["kind"] == "test"][-1]
    end = next(line for line in lines if line["kind"] == "end")
    story = [f"step {line['step']:>5}: {line['text'].removeprefix('natgrad: ')}" for line in lines if _told(line)]
    return Result(test["accuracy"], test["loss"], end["seconds"], longest, killed, story)


def _told(line: dict[str, Any]) -> bool:
    return bool(line["kind"] == "warning")


def _size(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").stat().st_size
    except OSError:
        return 0


def _worker(torchrun: int, rank: int) -> int | None:
    """The process that works as a helper: the child of the one that torchrun has started for its rank."""
    for supervisor in _children(torchrun):
        with suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{supervisor}/environ").read_bytes().split(b"\0"):
                return next(iter(_children(supervisor)), None)
    return None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two kills")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    out = Path(tempfile.mkdtemp(prefix="natgrad-helpers-")) if given.out is None else given.out
    out.mkdir(parents=True, exist_ok=True)
    cases = {"no helpers": (False, 0), "helpers": (True, 0), "helpers, killed": (True, given.kills)}
    for name, (helpers, kills) in cases.items():
        folder = out / name.replace(", ", "-").replace(" ", "-")
        result = run(folder, epochs=given.epochs, helpers=helpers, kills=kills, pause=given.pause)
        print(
            f"{name:<16} test accuracy {result.accuracy:.1%}, loss {result.loss:.4f}, {result.seconds:.1f} s of "
            f"training, longest silence {result.longest:.1f} s, {result.kills} kills"
        )
        for line in result.story:
            print(f"    {line}")


if __name__ == "__main__":
    main()
