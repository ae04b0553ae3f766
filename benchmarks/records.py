"""What `benchmarks.table` has measured, as JSON: files of several runs can be merged, lines are found in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import lines
from benchmarks.approximations.common import facts
from benchmarks.command import written_by
from benchmarks.contenders import Contender
from benchmarks.lines import Line
from benchmarks.loops import Measured
from benchmarks.workloads import Configuration, Workload

Record = dict[str, Any]


def key_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What it is a measurement of."""
    names = (
        "kind",
        "device_type",
        "model",
        "batch",
        "precision",
        "size",
        "classes",
        "factor",
        "inverse",
        "way",
        "solver",
    )
    return tuple(record[name] for name in names)


def merged(found: Iterable[Record]) -> list[Record]:
    """Each measurement once; later ones win."""
    return list({key_of(record): record for record in found}.values())


def loop_record(work: Workload, one: Measured) -> Record:
    """For machines to read."""
    repeats = [asdict(repeat) for repeat in one.repeats]
    what = record_of("loop", work, one.contender)
    return {**what, "summary": one.summary(), "ratios": one.ratios(), "error": one.error, "repeats": repeats}


def record_of(kind: str, work: Workload, contender: Contender | None) -> Record:
    """What was measured where; no contender is SGD."""
    return {
        "kind": kind,
        **facts(work.device, device_type=work.device.torch.type),
        **asdict(work.configuration),
        "solver": None if contender is None else contender.solver,
        "way": None if contender is None else contender.way,
        "factor": None if contender is None else contender.intervals.factor,
        "inverse": None if contender is None else contender.intervals.inverse,
    }


def configuration_of(record: Mapping[str, Any]) -> Configuration:
    """The workload that was measured."""
    return Configuration(**{name: record[name] for name in Configuration.__dataclass_fields__})


def _fits(line: Line, record: Record) -> bool:
    """Whether it is a measurement of what the line is about, in whatever way."""
    wanted = {
        "kind": "loop",
        "device_type": line.device,
        **asdict(line.configuration),
        "factor": line.intervals.factor,
        "inverse": line.intervals.inverse,
    }
    return all(record[name] == value for name, value in wanted.items())


def records_of(line: Line, found: Sequence[Record], way: str) -> dict[str, Record]:
    """The measurements of a line in one way, by solver."""
    return {one["solver"]: one for one in found if _fits(line, one) and one["way"] == line.way(way)}


def ways_of(line: Line, found: Sequence[Record]) -> list[str]:
    """Those in which a line was measured, with what it adds, and without what another line of the same work adds."""
    alike = (line.device, line.configuration, line.intervals)
    others = {one.plus for one in lines.LINES if (one.device, one.configuration, one.intervals) == alike}
    names = dict.fromkeys(record["way"] for record in found if _fits(line, record))
    return [name for name in names if name == line.way(name) and not (others - {line.plus}) & {*name.split("+")}]


def ratio_of(line: Line, record: Record | None) -> float | None:
    """To the SGD that the line is about; None where it is not known."""
    name = "compiled_ratio" if line.compiled else "ratio"
    return None if record is None else record["summary"].get(name)


def spread_of(record: Record | None) -> float | None:
    """How much SGD's own turns differed; None where nobody kept it, as before the table asked."""
    return None if record is None else record["summary"].get("sgd_spread")


def write(path: Path, found: Sequence[Record]) -> None:
    """As JSON, a record on one line."""
    lines = ",\n".join(json.dumps(record) for record in found)
    path.write_text(f'{{"records": [\n{lines}\n]}}\n')


def read(path: Path) -> list[Record]:
    """What `write` has written; ValueError names a file that is something else."""
    with written_by("benchmarks.table", path):
        records: list[Record] = json.loads(path.read_text())["records"]
        for record in records:
            key_of(record)
            record["summary" if record["kind"] == "loop" else "parts"].keys()
    return records
