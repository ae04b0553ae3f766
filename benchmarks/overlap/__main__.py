"""Decompositions off the critical path: what they do to the times of steps, and to the progress of training.

python -m benchmarks.overlap times --model resnet50 --batch 128 --precision tf32 --steps 320 --out docs
python -m benchmarks.overlap cifar10 --data FOLDER --epochs 20 --out docs    # the first paper's Figure 2

Each writes JSON and a picture into the folder that ``--out`` names, and ``--plot-only`` draws such JSON again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benchmarks.overlap import cifar10, times


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two; 1 where something in it failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="times|cifar10")
    times.add_arguments(commands.add_parser("times", help="how long every step takes"))
    cifar10.add_arguments(commands.add_parser("cifar10", help="training curves, by updates and by the clock"))
    given = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        worked: bool = given.run(given)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(f"({time.perf_counter() - start:.0f} s in all)")
    return 0 if worked else 1


if __name__ == "__main__":
    raise SystemExit(main())
