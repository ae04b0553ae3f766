"""Comparisons that nobody trained, but that look as if: for tests of the page, and to look at it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from natgrad.compare.history import Comparison, Contender, Layer, Point, Reading, Run, Trial

ENVIRONMENT = {
    "started": "2026-11-17T20:15:02+00:00",
    "command": "python -m natgrad compare secret-command",
    "folder": "/home/somebody/secret-folder",
    "git_commit": "1793b4f0c1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6",
    "natgrad": "0.9.0",
    "torch": "2.10.0+cu128",
    "python": "3.11.9",
    "cuda": "12.8",
    "cudnn": 91002,
    "ranks": 1,
    "threads": 8,
    "device": {"type": "cuda", "name": "NVIDIA H200", "memory": 150_754_820_096},
    "cpu": {"name": "AMD EPYC 9654", "usable_cores": 16, "memory": 137_438_953_472},
    "platform": "Linux-6.8.0-x86_64-with-glibc2.36",
    "host": "secret-host",
    "variables": {"NCCL_DEBUG": "secret-variable"},
}
ABOUT = {
    "recipe": "cifar10-resnet32",
    "device": "NVIDIA H200",
    "data": "CIFAR-10, 50 000 images",
    "parameters": 464_154,
    "batch": 512,
    "epochs": 30,
    "steps_per_epoch": 98,
    "ranks": 1,
}
PARTS = {
    "SGD": {"data": 0.0011, "model": 0.0127},
    "AdamW": {"data": 0.0011, "model": 0.0139},
    "K-FAC": {"data": 0.0011, "model": 0.0131, "statistics": 0.0042, "solve": 0.0061, "precondition": 0.0023},
}
FLOOR = {"SGD": 0.079, "AdamW": 0.084, "K-FAC": 0.074}
SPEED = {"SGD": 0.0021, "AdamW": 0.0025, "K-FAC": 0.0062}


def comparison(*, names: Sequence[str] = ("SGD", "AdamW", "K-FAC"), seeds: int = 3, layers: int = 34) -> Comparison:
    """Like one of ResNet-32 on CIFAR-10. Contenders whose names begin with K-FAC use it."""
    return Comparison(
        title="ResNet-32 on CIFAR-10: SGD, AdamW and K-FAC",
        contenders=tuple(contender(name, index, seeds, layers) for index, name in enumerate(names)),
        tuning="Each contender had 12 trials of up to 9 epochs (successive halving), then 3 seeds of 30 epochs.",
        notes=("Test cases were seen only after each epoch; their time is not part of the seconds.",),
    )


def contender(name: str, index: int = 0, seeds: int = 3, layers: int = 34) -> Contender:
    uses_kfac = name.startswith("K-FAC")
    kind = "K-FAC" if uses_kfac else name if name in PARTS else "SGD"
    random_ = random.Random(f"{name} {index}")
    runs = tuple(run(name, kind, seed, random_, layers) for seed in range(seeds))
    tried = trials(uses_kfac, random_)
    settings = next((trial.settings for trial in tried if trial.chosen), {})
    return Contender(name=name, runs=runs, uses_kfac=uses_kfac, settings=settings, trials=tried)


def run(name: str, kind: str, seed: int, random_: random.Random, layers: int, *, steps: int = 2940) -> Run:
    uses_kfac = kind == "K-FAC"
    parts = {part: value * random_.uniform(0.97, 1.03) for part, value in PARTS[kind].items()}
    a_step = sum(parts.values())
    speed = SPEED[kind] * random_.uniform(0.88, 1.12)

    def loss(step: int, floor: float) -> float:
        return (
            floor
            + (2.3 - floor) * math.exp(-speed * step) * random_.uniform(0.93, 1.07)
            + 0.05 * floor * random_.random()
        )

    def error(step: int, floor: float) -> float:
        return (
            floor
            + (0.9 - floor) * math.exp(-1.15 * speed * step) * random_.uniform(0.95, 1.05)
            + 0.05 * floor * random_.random()
        )

    return Run(
        folder=Path(f"/home/somebody/runs/compare/{name}/seed-{seed}"),
        name=name,
        seed=seed,
        uses_kfac=uses_kfac,
        train=tuple(
            Point(step=step, seconds=step * a_step, loss=loss(step, 0.012), error=error(step, 0.003))
            for step in range(20, steps + 1, 20)
        ),
        test=tuple(
            Point(step=step, seconds=step * a_step, loss=loss(step, FLOOR[kind] * 3.7), error=error(step, FLOOR[kind]))
            for step in range(98, steps + 1, 98)
        ),
        parts=parts,
        readings=readings(random_, a_step, steps) if uses_kfac else (),
        layers=of_layers(random_, layers, steps) if uses_kfac else (),
        coverage=coverage(layers) if uses_kfac else (),
        reason="finished",
        steps=steps,
        seconds=steps * a_step,
        planned_steps=steps,
        about=ABOUT,
        environment=ENVIRONMENT,
        warnings=("a factor of layer1.0.conv2 could not be decomposed; the last one is kept",) * 2
        if uses_kfac and seed == 1
        else (),
    )


def readings(random_: random.Random, a_step: float, steps: int) -> tuple[Reading, ...]:
    return tuple(
        Reading(
            step=step,
            seconds=step * a_step,
            predicted_kl=0.02 * math.exp(-step / 700) * random_.uniform(0.5, 2) + 1e-5,
            clip_factor=min(1.0, 0.2 + step / 1500) * random_.uniform(0.95, 1.0),
            damping=0.003,
        )
        for step in range(20, steps + 1, 20)
    )


def layer_names(count: int) -> list[str]:
    middle = [f"layer{1 + 3 * i // max(1, count - 2)}.{i // 2}.conv{1 + i % 2}" for i in range(count - 2)]
    return ["conv1", *middle, "fc"][:count]


def of_layers(random_: random.Random, count: int, steps: int) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            step=step,
            name=name,
            condition=10 ** (2 + 2.5 * index / count + step / 2500 + random_.uniform(-0.2, 0.2)),
            age=random_.randrange(10) + (40 if index == 7 and step % 400 == 0 else 0),
        )
        for step in range(100, steps + 1, 100)
        for index, name in enumerate(layer_names(count))
    )


def coverage(count: int) -> tuple[dict[str, Any], ...]:
    lines = [
        {
            "parameter": f"{name}.weight", "block": "convolution", "factors": "A 577² · G 64²", "bytes": 2_695_000,
            "reason": "", "elements": 36_864, "note": "",
        }
        for name in layer_names(count)
    ]  # fmt: skip
    norm = {
        "parameter": "bn1.weight", "block": "", "factors": "", "bytes": 0, "elements": 16, "note": "",
        "reason": "batch normalization has no Kronecker factors",
    }  # fmt: skip
    return (*lines, norm)


def trials(uses_kfac: bool, random_: random.Random) -> tuple[Trial, ...]:
    made: list[Trial] = []
    for index in range(12):
        rate = float(f"{10 ** (-3 + 3 * index / 11):.2g}")
        settings = {"lr": rate, **({"damping": float(f"{10 ** random_.uniform(-4, -1):.2g}")} if uses_kfac else {})}
        at_first = 0.25 + 0.16 * (math.log10(rate) + 1.1) ** 2 + random_.uniform(-0.02, 0.02)
        if index == 11:
            made.append(Trial(settings=settings, rungs=((1, None),), note="diverged: the loss is no number"))
            continue
        rungs = [(1, at_first)]
        if abs(math.log10(rate) + 1.1) < 1.1:
            rungs.append((3, 0.62 * at_first))
        if abs(math.log10(rate) + 1.1) < 0.5:
            rungs.append((9, 0.4 * at_first))
        made.append(Trial(settings=settings, rungs=tuple(rungs)))
    best = min((one for one in made if len(one.rungs) == 3), key=lambda one: one.rungs[-1][1] or math.inf)
    return tuple(
        Trial(settings=one.settings, rungs=one.rungs, chosen=one is best, note=one.note) for one in made
    )  # fmt: skip
