"""The lines of the table: workloads with the ratios to SGD that others reach and that are to be reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.timing import INTERVALS, Intervals
from benchmarks.workloads import Configuration

PEER = (
    "Peer: the second paper's own code as it stands today, on an H200 (CPU lines: on two cores). Known numbers, not "
    "measured by this command."
)
PEER_WORST = "15-19"
TARGET_WORST = 2.0
TARGET_MEMORY = 0.05  # of SGD's peak, beyond SGD's peak, factors and decompositions
RARE, OFTEN = INTERVALS


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison with SGD. `peer` and `target` are ratios by solver; `plus` is added to every way."""

    number: str
    name: str
    label: str
    device: str
    configuration: Configuration
    intervals: Intervals
    peer: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)
    plus: str = ""
    compiled: bool = False

    def way(self, way: str) -> str:
        """That of its contenders."""
        parts = way.split("+")
        return way if not self.plus or self.plus in parts else f"{way}+{self.plus}"


def _resnet50(precision: str, batch: int = 128) -> Configuration:
    return Configuration(model="resnet50", batch=batch, precision=precision)


_RESNET32 = Configuration(model="resnet32", batch=128, precision="tf32")
_RESNET20 = Configuration(model="resnet20", batch=128, precision="fp32")

LINES: tuple[Line, ...] = (
    Line(
        number="1",
        name="resnet50",
        label="ResNet-50, 224², batch 128, TF32, 10/100",
        device="cuda",
        configuration=_resnet50("tf32"),
        intervals=RARE,
        peer={"eigen": 1.52, "inverse": 1.34},
        target={"eigen": 1.08, "inverse": 1.05},
    ),
    Line(
        number="2",
        name="resnet50-bf16",
        label="ResNet-50, batch 128, bf16 channels-last, 10/100",
        device="cuda",
        configuration=_resnet50("bf16"),
        intervals=RARE,
        peer={"eigen": 2.85},
        target={"eigen": 1.18, "inverse": 1.12},
    ),
    Line(
        number="3",
        name="resnet50-often",
        label="ResNet-50, batch 128, TF32, 1/10",
        device="cuda",
        configuration=_resnet50("tf32"),
        intervals=OFTEN,
        peer={"eigen": 4.1, "inverse": 2.9},
        target={"eigen": 1.9, "inverse": 1.5},
    ),
    Line(
        number="4",
        name="resnet50-small",
        label="ResNet-50, batch 32, TF32, 10/100",
        device="cuda",
        configuration=_resnet50("tf32", 32),
        intervals=RARE,
        peer={"eigen": 2.5, "inverse": 2.2},
        target={"eigen": 1.2, "inverse": 1.15},
    ),
    Line(
        number="5",
        name="resnet32",
        label="CIFAR ResNet-32, batch 128, TF32, 1/10",
        device="cuda",
        configuration=_RESNET32,
        intervals=OFTEN,
        peer={"eigen": 8.1},
        target={"eigen": 1.5, "inverse": 1.4},
    ),
    Line(
        number="5c",
        name="resnet32-compiled",
        label="CIFAR ResNet-32, 1/10, against compiled SGD",
        device="cuda",
        configuration=_RESNET32,
        intervals=OFTEN,
        peer={"eigen": 16.0},
        target={"eigen": 3.0, "inverse": 2.8},
        compiled=True,
    ),
    Line(
        number="6",
        name="gpt",
        label="GPT, 12 × 768, 48k tokens, bf16, 10/100",
        device="cuda",
        configuration=Configuration(model="gpt", batch=48, precision="bf16"),
        intervals=RARE,
        plus="quarter",
        target={"eigen": 1.10, "inverse": 1.07},
    ),
    Line(
        number="9a",
        name="resnet20",
        label="ResNet-20, batch 128, CPU, 10/100",
        device="cpu",
        configuration=_RESNET20,
        intervals=RARE,
        peer={"eigen": 1.5},
        target={"eigen": 1.10},
    ),
    Line(
        number="9b",
        name="resnet20-often",
        label="ResNet-20, batch 128, CPU, 1/10",
        device="cpu",
        configuration=_RESNET20,
        intervals=OFTEN,
        peer={"eigen": 6.1},
        target={"eigen": 1.8},
    ),
    Line(
        number="9c",
        name="resnet20-reduce",
        label="ResNet-20, batch 128, CPU, 1/10, reduce",
        device="cpu",
        configuration=_RESNET20,
        intervals=OFTEN,
        target={"eigen": 1.35},
        plus="reduce",
    ),
)


def chosen_lines(given: str | None, device: str, lines: Sequence[Line] = LINES) -> list[Line]:
    """By numbers (5 is 5 and 5c, 9 all of the CPU's) or names, with commas; by default all that the device can."""
    able = [line for line in lines if line.device == device]
    if given is None:
        return able
    found: list[Line] = []
    for word in given.split(","):
        meant = [line for line in lines if word in (line.number, line.name, line.number.rstrip("abc"))]
        some = [line for line in meant if line in able]
        if not some:
            known = ", ".join(f"{line.number} ({line.name})" for line in able)
            why = f", which needs --device {meant[0].device}" if meant else ""
            why = ", which comes with the others" if word in ("7", "8") else why
            raise ValueError(f"--lines takes {known} on this device; got {word!r}{why}")
        found += [line for line in some if line not in found]
    return found
