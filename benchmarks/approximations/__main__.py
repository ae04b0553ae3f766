"""What the papers' approximations cost and save: three measurements, each a table and, with ``--out``, JSON.

python -m benchmarks.approximations alexnet    # AlexNet's first linear layer with three factors and with two
python -m benchmarks.approximations reduce     # expand (KFC) and reduce (Appendix A), per layer of ResNet-50
python -m benchmarks.approximations sharing    # factors that layers have in common, kept and decomposed once
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.approximations.alexnet import run_alexnet
from benchmarks.approximations.reduce import run_reduce
from benchmarks.approximations.sharing import run_sharing
from benchmarks.command import device_of
from benchmarks.workloads import (
    PRECISIONS,
)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the papers' approximations cost and save.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "alexnet": "three factors or two for AlexNet's first linear layer",
        "reduce": "Appendix A's factors beside KFC's, per layer of ResNet-50",
        "sharing": "factors that layers have in common",
    }
    added = {name: commands.add_parser(name, help=text, description=text) for name, text in helps.items()}
    for name, command in added.items():
        add = command.add_argument
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--batch", type=int, help=f"default {'32, CPU 4' if name == 'sharing' else '128, CPU 8'}")
        add("--image", type=int, default=64 if name == "sharing" else 224, help="default %(default)s")
        add("--precision", choices=PRECISIONS[:2] if name != "reduce" else PRECISIONS, help="default tf32, CPU fp32")
        add("--repeats", type=int, help="medians of so many (default 5, CPU 3)")
        add("--out", type=Path, help="write JSON to this file")
    added["alexnet"].add_argument("--classes", type=int, default=1000)
    added["alexnet"].add_argument("--cases", default="three,two", help="factors of the first linear layer: three, two")
    added["reduce"].add_argument("--plot", type=Path, help="write the picture to this file")
    added["sharing"].add_argument("--width", type=int, default=768, help="of the transformer blocks")
    added["sharing"].add_argument("--length", type=int, default=64, help="of the sequences")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement."""
    parser = arguments()
    given = parser.parse_args(argv)
    try:
        device = device_of(given.device)
    except ValueError as error:
        parser.error(str(error))
    given.precision = given.precision or ("tf32" if device.is_cuda else "fp32")
    given.repeats = given.repeats or (5 if device.is_cuda else 3)
    device.set_precision(given.precision)
    start = time.perf_counter()
    run = {"alexnet": run_alexnet, "reduce": run_reduce, "sharing": run_sharing}[given.command]
    found = run(given, device)
    print(f"({time.perf_counter() - start:.0f} s in all)", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
