"""Kills ranks of a run at random moments, again and again, and looks whether anything was lost.

    python -m benchmarks.kill --times 20 --ranks 2

Each run is `torchrun --max-restarts ... -m natgrad train digits`, as anybody would start it: torchrun restarts the
ranks, and they go on from the last checkpoint without being told to. A random rank gets SIGKILL, mostly while it
trains, evaluates or saves, now and then while it starts. What the run has come to in the end, weights, optimizer,
K-FAC and average, must be that of a run nobody disturbed, bit for bit, and so must be every test result on the way.
A run that stands still for two minutes counts as hanging.

Checkpoints are made at evaluations, every so many steps, and not by the clock: on several ranks making one brings
K-FAC's sums together, which rounds, so runs are only the same to the last bit where they save after the same steps.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from natgrad.training.checkpoints import Checkpoints
from natgrad.training.metrics_file import read

CASES = 1500  # of the recipe's, to train on
BATCH = 120  # of all ranks
PATIENCE = 120.0  # seconds
PARTS = ("step", "model", "optimizer", "kfac", "average")


class HangsError(Exception):
    """Nothing has happened for long."""


@dataclass
class Killed:
    """How a run went: the ranks that were killed, and how many of them before their attempt had made a checkpoint."""

    ranks: list[int]
    starting: int
    restarts: int


def overrides(*, steps: int, every: int) -> list[str]:
    per_epoch = CASES // BATCH
    return [
        f"training.steps={steps}",
        f"training.epochs={math.ceil(steps / per_epoch)}",
        f"training.evaluate_every={every / per_epoch}",
        "training.checkpoint_every=1e9",
        "training.polyak=0.9",
        "training.label_smoothing=0.1",  # so that there is something to learn up to the end
        "optimizer.lr=0.01",
        "optimizer.momentum=0.5",
        'kfac.fisher="sampled"',
        "kfac.factor_update_steps=2",
        "kfac.inv_update_steps=6",
    ]


@contextmanager
def torchrun(folder: Path, given: list[str], *, ranks: int, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
    """Training on some ranks; no process of it is left afterwards."""
    if BATCH % ranks:
        raise ValueError(f"{BATCH} cases do not divide by {ranks} ranks")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = ["-m", "natgrad", "train", "digits", *given, f"training.batch={BATCH // ranks}", "--out", str(folder)]
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher, "--max-restarts", str(restarts), *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    everybody = {process.pid}
    try:
        yield process
    finally:
        everybody.update(_children(process.pid))
        for pid in everybody:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def undisturbed(folder: Path, given: list[str], *, ranks: int) -> None:
    with torchrun(folder, given, ranks=ranks, restarts=0) as process:
        if process.wait(600):
            raise RuntimeError(f"the undisturbed run has failed: see {folder.with_suffix('.log')}")


def disturbed(folder: Path, given: list[str], *, ranks: int, times: int, draw: random.Random) -> Killed:
    """Begins a run, kills ranks of it, so many times at most, and lets it come to its end."""
    found = Killed(ranks=[], starting=0, restarts=0)
    with torchrun(folder, given, ranks=ranks, restarts=times) as process:
        alive = _waited(partial(_processes, process, ranks, {}), process, folder)
        while alive and len(found.ranks) < times:
            at, starting = newest(folder), draw.random() < 0.2
            if not starting:
                _waited(partial(_is_past, folder, at), process, folder)
            time.sleep(draw.uniform(0, 4.0) if starting else draw.expovariate(2.0))
            rank = draw.randrange(ranks)
            if process.poll() is not None or not os.path.exists(f"/proc/{alive[rank]}"):
                break  # it has come to its end meanwhile
            os.kill(alive[rank], signal.SIGKILL)
            found.ranks.append(rank)
            found.starting += newest(folder) == at
            alive = _waited(partial(_processes, process, ranks, alive), process, folder)
            found.restarts += alive is not None
        _waited(lambda: None, process, folder)
        if process.returncode:
            raise RuntimeError(f"the run has failed: see {folder.with_suffix('.log')}")
    return found


def newest(folder: Path) -> int:
    """The step of the last checkpoint."""
    return max((int(path.stem.partition("-")[2]) for path in folder.glob("checkpoints/step-*.pt")), default=0)


def _is_past(folder: Path, step: int) -> bool:
    return newest(folder) > step


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """What is not the same to the last bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype:
        if a.numpy().tobytes() != b.numpy().tobytes():
            largest = float((a.double() - b.double()).abs().max() / b.double().abs().max())
            yield f"{where} by {largest:.1e} of its largest number"
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from differences(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{where}/{number}")
    elif type(a) is not type(b) or a != b:
        yield where


def outcome(folder: Path) -> dict[str, Any]:
    """What training has come to, and the test results on the way."""
    found = Checkpoints(folder / "checkpoints", keep=1).latest()
    if found is None or found.damaged:
        raise RuntimeError(f"{folder}: {'no checkpoint' if found is None else found.damaged}")
    lines = [line for line in read(folder / "metrics.jsonl") if line["kind"] == "test"]
    tests = [(line["step"], line["loss"], line["accuracy"]) for line in lines]
    return {**{part: found.state[part] for part in PARTS}, "tests": tests}


def _processes(process: subprocess.Popen[bytes], ranks: int, before: dict[int, int]) -> dict[int, int]:
    """The processes of all ranks after a restart, by rank; nothing while some are still to come."""
    found = {}
    for pid in _children(process.pid):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found.update({int(word[5:]): pid for word in words if word.startswith(b"RANK=")})
    return found if len(found) == ranks and not set(found.values()) & set(before.values()) else {}


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _waited(condition: Callable[[], Any], process: subprocess.Popen[bytes], folder: Path) -> Any:
    """What a condition says when it first says something, or nothing when the run has ended."""
    step, moved = newest(folder), time.monotonic()
    while process.poll() is None:
        if found := condition():
            return found
        if newest(folder) != step:
            step, moved = newest(folder), time.monotonic()
        if time.monotonic() - moved > PATIENCE:
            raise HangsError(f"nothing for {PATIENCE:g} s after step {step}: see {folder.with_suffix('.log')}")
        time.sleep(0.01)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="kills; where one run does not last, in several")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=3, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the runs; default: one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        given, draw, began = (
            overrides(steps=options.steps, every=options.every),
            random.Random(options.seed),
            time.time(),
        )
        undisturbed(out / "undisturbed", given, ranks=options.ranks)
        expected, runs = outcome(out / "undisturbed"), list[Killed]()
        print(f"undisturbed: {options.steps} steps in {time.time() - began:.0f} s, start included", flush=True)
        while (left := options.times - sum(len(one.ranks) for one in runs)) > 0:
            folder, since = out / f"disturbed-{len(runs)}", time.time()
            runs.append(disturbed(folder, given, ranks=options.ranks, times=left, draw=draw))
            different = list(differences(outcome(folder), expected))
            killed = " ".join(map(str, runs[-1].ranks))
            print(
                f"killed: rank {killed}; {time.time() - since:.0f} s; {'different' if different else 'same'}",
                flush=True,
            )
            if different:
                sys.exit("\n".join(different))
    kills = sum(len(one.ranks) for one in runs)
    print(
        f"{kills} kills of {options.ranks} ranks ({sum(one.ranks.count(0) for one in runs)} of the first, "
        f"{sum(one.starting for one in runs)} before a new checkpoint) in {len(runs)} runs of {options.steps} steps, "
        f"{sum(one.restarts for one in runs)} restarts, {time.time() - began:.0f} s: nothing lost, no hang"
    )


if __name__ == "__main__":
    main()
