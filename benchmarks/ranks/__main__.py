"""K-FAC's work on several ranks: four measurements, each as tables in markdown and, with ``--out``, JSON. No GPU.

python -m benchmarks.ranks balance    # slowest and mean worker of a refresh, as the second paper's tables V and VI
python -m benchmarks.ranks traffic    # bytes and calls by strategy, beside the published scheme's
python -m benchmarks.ranks times      # where the time of a step goes, on ranks of this machine
python -m benchmarks.ranks overlap    # what of the messages is hidden behind other work
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

import natgrad
from benchmarks.ranks.balance import run_balance
from benchmarks.ranks.common import Outcome
from benchmarks.ranks.overlap import run_overlap
from benchmarks.ranks.times import run_times
from benchmarks.ranks.traffic import run_traffic

MEASUREMENTS: dict[str, Callable[[], Outcome]] = {
    "balance": run_balance,
    "traffic": run_traffic,
    "times": run_times,
    "overlap": run_overlap,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurements that are asked for, or all."""
    parser = argparse.ArgumentParser(description="K-FAC's work on several ranks.")
    parser.add_argument("what", nargs="*", choices=[*MEASUREMENTS, []], help="by default all")
    parser.add_argument("--out", type=Path, help="write JSON to this file")
    given = parser.parse_args(argv)
    found: dict[str, object] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "natgrad": natgrad.__version__,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    for name in given.what or MEASUREMENTS:
        start = time.perf_counter()
        outcome = MEASUREMENTS[name]()
        for table in outcome.tables:
            print(f"{table}\n", flush=True)
        print(f"({name}: {time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
        found[name] = {"tables": [asdict(table) for table in outcome.tables], "records": outcome.records}
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
