"""What K-FAC does with every parameter of a model, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from natgrad.blocks.factor import Factor
from natgrad.blocks.kronecker import KroneckerBlock
from natgrad.blocks.registry import Registry
from natgrad.precondition.preconditioner import Preconditioner

NOT_YET = "not known yet: run one training step"
NO_STATISTICS = "no statistics yet: known after the next step that takes them"
UNKNOWN = (NOT_YET, NO_STATISTICS)
"""Reasons that say nothing of the parameter itself."""


@dataclass(frozen=True)
class Line:
    """One parameter, or one covered slice of it. `reason` says why a parameter is left to the optimizer; empty where
    it is covered. `note` says why a covered one has no better approximation. `owner` names the rank, or ranks, that
    decompose its factors, where there are several.
    """

    parameter: str
    block: str
    factors: str
    bytes: int
    reason: str = ""
    elements: int = 0
    note: str = ""
    owner: str = ""

    @property
    def covered(self) -> bool:
        """Whether K-FAC preconditions it."""
        return not self.reason


@dataclass(frozen=True)
class Report:
    """One line a parameter, in the model's order. Factors: A of the inputs, G of the output derivatives."""

    lines: tuple[Line, ...]
    state: str = ""

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, parameter: str) -> Line:
        for line in self.lines:
            if line.parameter == parameter:
                return line
        raise KeyError(parameter)

    @property
    def bytes(self) -> int:
        """Memory of all factors and decompositions; what blocks share is counted once."""
        return sum(line.bytes for line in self.lines)

    def __str__(self) -> str:
        rows = [("parameter", "block", "factors", "memory", "rank" if any(line.owner for line in self.lines) else "")]
        rows += [
            (line.parameter, line.block, line.factors, memory(line.bytes), line.owner)
            if line.covered
            else (
                line.parameter,
                line.reason if line.reason in UNKNOWN else f"left to the optimizer: {line.reason}",
                "",
                "",
                "",
            )
            for line in self.lines
        ]
        name_width = max(len(row[0]) for row in rows)
        # Reasons run on to the right; they don't widen the block column.
        widths = [name_width, *(max(len(row[c]) for row in rows if row[2] or c != 1) for c in (1, 2, 3))]
        text = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2]), row[3].rjust(widths[3])]
            cells.append(row[4])
            text.append("  ".join(cells).rstrip())
        # Notes of layers alike are said once, under the table.
        notes: dict[str, list[str]] = {}
        for line in self.lines:
            if line.note:
                notes.setdefault(line.note, []).append(line.parameter)
        for note, names in notes.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text.append(f"{', '.join(names[:3])}{more}: {note}")
        covered = [line for line in self.lines if line.covered]
        share = sum(line.elements for line in covered) / max(1, sum(line.elements for line in self.lines))
        text.append(
            f"{len(covered)} of {len(self.lines)} parameters ({share:.1%} of all weights) have a block; "
            f"{memory(self.bytes)} of factors and decompositions; {self.state}"
        )
        return "\n".join(text)


def memory(count: float) -> str:
    """Bytes, for people: ``161.8 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the loop returns")


def build_report(
    sizes: Mapping[str, int],
    registry: Registry,
    preconditioner: Preconditioner,
    reasons: Mapping[str, str],
    state: str,
    *,
    owners: Mapping[str, str] = MappingProxyType({}),
) -> Report:
    """A line for every parameter: its blocks, or the reason why it has none."""
    counted: set[int] = set()
    lines = []
    for name, elements in sizes.items():
        blocks = registry.covering(name)
        if not blocks:
            lines.append(Line(name, "", "", 0, reasons[name], elements))
            continue
        if blocks[0].weight.name != name:
            lines.append(Line(name, f"with {blocks[0].weight.name}", "the last of A", 0, elements=elements))
            continue
        factors = " ; ".join(dict.fromkeys(_describe(block, registry) for block in blocks))
        kind = blocks[0].kind + (", reduced" if blocks[0].form.reduced else "")
        if blocks[0].weight.box is not None:
            kind += " " + " ".join(block.weight.label.removeprefix(name) for block in blocks)
        memory = sum(_bytes(block, preconditioner, counted) for block in blocks)
        owner = " ; ".join(dict.fromkeys(owners.get(block.key, "") for block in blocks))
        note = blocks[0].form.note
        lines.append(Line(name, kind, factors, memory, elements=elements, note=note, owner=owner))
    return Report(tuple(lines), state)


def _describe(block: KroneckerBlock, registry: Registry) -> str:
    stack = f"{block.shape[0]} × " if block.shape[0] > 1 else ""
    row, *columns = block.straight.sides
    parts = [_side("A", factor, block, registry) for factor in columns]
    parts.append(_side("G", row, block, registry))
    tied = ", used in both orientations" if block.swapped is not None else ""
    return f"{stack}{' · '.join(parts)}{tied}"


def _side(letter: str, factor: Factor, block: KroneckerBlock, registry: Registry) -> str:
    size = factor.sum.shape[1]
    text = f"{letter} {size} diagonal" if factor.diagonal else f"{letter} {size}²"
    first = next(other for other in registry if factor in other.straight.sides)
    return text if first is block else f"{text} (of {first.key})"


def _bytes(block: KroneckerBlock, preconditioner: Preconditioner, counted: set[int]) -> int:
    total = 0
    solved = preconditioner.solved.get(block.key)
    sides = () if solved is None else solved.sides
    for factor in block.factors():
        if id(factor) not in counted:
            counted.add(id(factor))
            total += factor.bytes
    for side in sides:
        if id(side) not in counted:
            counted.add(id(side))
            total += sum(part.numel() * part.element_size() for part in (side.matrix, side.values) if part is not None)
    return total
