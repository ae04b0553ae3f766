"""What ranks send to each other, counted by K-FAC itself on ranks of this machine, beside the published scheme.

The published code sends every factor whole, a message each, whenever statistics are taken, and at every decomposition
the eigenvectors and eigenvalues of every factor. Bytes of a message are those of its buffer, whatever the number of
ranks and the algorithm that moves it: for ours as for the published.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import natgrad
from benchmarks.ranks.common import MIB, Loop, Outcome, Table, on_ranks
from natgrad.distribute.placement import Work
from natgrad.distribute.plan import Plan
from natgrad.distribute.traffic import Sent, messages

REFRESH, STATISTICS, ORDINARY = "refresh", "statistics", "ordinary"
FACTOR_STEPS, REFRESH_STEPS = 2, 4  # one step of each kind comes by in every four
KINDS = ("factors", "solutions", "gradients", "meetings")
INTERVALS = (10, 100)  # what a step costs on average is told for these
# What is known to be sent for ResNet-20 on two ranks, by a later version of the published code.
KNOWN = {"factors": (8.9, None), "solutions": (10.0, 60)}


@dataclass(frozen=True)
class Setting:
    """What is counted."""

    model: str
    ranks: int
    strategy: str
    solver: str
    wire: str = ""

    def loop(self, batch: int, image: int) -> Loop:
        """On this rank."""
        wire = torch.bfloat16 if self.wire else None
        return Loop(
            self.model,
            batch=batch,
            image=image,
            solver=self.solver,
            factor_update_steps=FACTOR_STEPS,
            inv_update_steps=REFRESH_STEPS,
            strategy=natgrad.Strategy(name=self.strategy, wire=wire),
        )


@dataclass(frozen=True)
class Counted:
    """What the busiest rank took part in, by kind of step and kind of message. `planned`: what the plan says of a
    refresh and of a step, for the same rank; `work` is what there was to do.
    """

    setting: Setting
    sent: dict[str, dict[str, Sent]]
    planned: dict[str, Sent]
    work: Work

    @property
    def average(self) -> float:
        """Bytes of a step, with statistics and decompositions as often as the papers have them."""
        refresh, step = self.sent[REFRESH], self.sent[ORDINARY]
        return (refresh["factors"].bytes + refresh["solutions"].bytes) / INTERVALS[1] + step["gradients"].bytes


def settings(model: str, ranks: int) -> list[Setting]:
    """Every strategy and solver; teams of half the ranks are teams of one where there are two."""
    names = ["comm-opt", "layer-wise", *(["hybrid"] if ranks > 2 else [])]
    found = [Setting(model, ranks, name, solver) for solver in ("inverse", "eigen") for name in names]
    return [*found, Setting(model, ranks, names[-1], "eigen", "bf16")]


def kind_of(step: int) -> str:
    """Of a step, from 0."""
    return REFRESH if step % REFRESH_STEPS == 0 else STATISTICS if step % FACTOR_STEPS == 0 else ORDINARY


def count(wanted: Sequence[Setting], batch: int, image: int, steps: int) -> list[tuple[list[dict[str, Sent]], Plan]]:
    """For each setting what this rank took part in, step by step, and the plan. Runs on every rank."""
    found = []
    for setting in wanted:
        loop = setting.loop(batch, image)
        before = _counters(loop.kfac)
        by_step = []
        for _ in range(steps):
            loop.step()
            after = _counters(loop.kfac)
            by_step.append({k: Sent(after[k].bytes - before[k].bytes, after[k].calls - before[k].calls) for k in KINDS})
            before = after
        found.append((by_step, loop.kfac.plan()))
        del loop
        gc.collect()  # a ResNet-50's factors and decompositions are gigabytes
    return found


def _counters(kfac: natgrad.KFAC) -> dict[str, Sent]:
    numbers = kfac.metrics()
    return {kind: Sent(int(numbers[f"{kind}_bytes"] or 0), int(numbers[f"{kind}_calls"] or 0)) for kind in KINDS}


def counted(setting: Setting, answers: Sequence[tuple[list[dict[str, Sent]], Plan]]) -> Counted:
    """The busiest rank of all."""
    totals = [sum(kinds[kind].bytes for kinds in by_step for kind in KINDS) for by_step, _ in answers]
    rank = totals.index(max(totals))
    by_step, plan = answers[rank]
    own = [message for message in messages(plan.work, plan.placement) if rank in message.ranks]
    planned = {
        kind: Sent(sum(m.bytes for m in own if m.kind == kind), sum(m.kind == kind for m in own)) for kind in KINDS
    }
    # Of each kind of step the last: the first includes what is agreed on once.
    return Counted(setting, {kind_of(step): sent for step, sent in enumerate(by_step)}, planned, plan.work)


def published(work: Work) -> dict[str, Sent]:
    """Factors of a step that takes statistics, and decompositions of a refresh, of the second paper's code, for the
    same layers; and, as *products*, decompositions as later versions of it send them: of every layer both bases and
    the products of their eigenvalues.
    """
    sizes = [size for layer in work.layers for size in layer.shape[1:]]
    squares = work.element_size * sum(size * size for size in sizes)
    return {
        "factors": Sent(squares, len(sizes)),
        "solutions": Sent(squares + work.element_size * sum(sizes), 2 * len(sizes)),
        "products": Sent(
            squares + work.element_size * sum(layer.elements for layer in work.layers), 3 * len(work.layers)
        ),
    }


def run_traffic() -> Outcome:
    """ResNet-20 and ResNet-50 on two and four ranks."""
    found: list[Counted] = []
    # A small batch will do: messages do not depend on it. ResNet-50's decompositions take a while here: one refresh.
    for model, image, steps in (("resnet20", 32, 2 * REFRESH_STEPS), ("resnet50", 64, 3)):
        for ranks in (2, 4):
            wanted = settings(model, ranks)
            answers = on_ranks(count, ranks, wanted, 2, image, steps)
            found += [counted(setting, [one[n] for one in answers]) for n, setting in enumerate(wanted)]
    models = dict.fromkeys(each.setting.model for each in found)
    tables = [table_of_messages([each for each in found if each.setting.model == model]) for model in models]
    tables.append(table_of_meetings(found))
    return Outcome(tables, [_record(each) for each in found])


def _record(each: Counted) -> dict[str, Any]:
    sent = {step: {kind: asdict(one) for kind, one in kinds.items()} for step, kinds in each.sent.items()}
    planned = {kind: asdict(one) for kind, one in each.planned.items()}
    return {**asdict(each.setting), "sent": sent, "planned": planned, "bytes_per_step": each.average}


def table_of_messages(found: Sequence[Counted]) -> Table:
    """Of one model, with the published scheme in front."""
    model, work = found[0].setting.model, found[-2].work
    scheme = published(work)
    factors = scheme["factors"].bytes / INTERVALS[0]
    rows = []
    for name, key in (("published", "solutions"), ("published, later", "products")):
        average = factors + scheme[key].bytes / INTERVALS[1]
        rows.append([name, "any", "eigen", _sent(scheme["factors"]), _sent(scheme[key]), "-", _mib(average), ""])
    if model == "resnet20":
        cells = [f"{size} MiB" + (f" in {calls}" if calls else "") for size, calls in KNOWN.values()]
        rows.append(["known", "2", "eigen", *cells, "-", "", ""])
    for each in found:
        one = each.setting
        refresh, step = each.sent[REFRESH], each.sent[ORDINARY]
        rows.append(
            [
                one.strategy + (f", {one.wire}" if one.wire else ""),
                str(one.ranks),
                one.solver,
                *(_sent(refresh[kind]) for kind in ("factors", "solutions")),
                _sent(step["gradients"]),
                _mib(each.average),
                agreement(each),
            ]
        )
    header = ["strategy", "ranks", "solver", "factors", "solutions", "gradients, every step"]
    return Table(
        f"Messages, {model}",
        [*header, f"per step at {INTERVALS[0]}/{INTERVALS[1]}", "plan"],
        rows,
        "Of the busiest rank, in how many messages. Published: factors whenever statistics are taken; ours: factors "
        f"and solutions at a refresh. *Per step* is the average with statistics every {INTERVALS[0]} steps and a "
        f"refresh every {INTERVALS[1]}.",
    )


def agreement(each: Counted) -> str:
    """Whether the plan said what was sent. Gradients come with a length of eight bytes a team."""
    refresh, step = each.sent[REFRESH], each.sent[ORDINARY]
    for kind, real in (("factors", refresh), ("solutions", refresh), ("gradients", step)):
        plan = each.planned[kind]
        size = plan.bytes + (8 * plan.calls if kind == "gradients" else 0)
        if real[kind] != Sent(size, plan.calls):
            return f"{kind}: {_sent(plan)}"
    return "equal"


def table_of_meetings(found: Sequence[Counted]) -> Table:
    """What hosts tell each other, with the strategy that needs most."""
    rows = []
    for model, ranks in dict.fromkeys((each.setting.model, each.setting.ranks) for each in found):
        own = [each for each in found if (each.setting.model, each.setting.ranks) == (model, ranks)]
        cells = []
        for kind in (ORDINARY, STATISTICS, REFRESH):
            most = max((each.sent[kind]["meetings"] for each in own), key=lambda sent: (sent.bytes, sent.calls))
            cells.append(f"{most.bytes:,} B in {most.calls}" if most.calls else "-")
        rows.append([model, str(ranks), *cells])
    return Table("Meetings of the hosts", ["model", "ranks", ORDINARY, STATISTICS, REFRESH], rows)


def _mib(count: float) -> str:
    return f"{count / MIB:,.2f} MiB" if count < 10 * MIB else f"{count / MIB:,.1f} MiB"


def _sent(sent: Sent) -> str:
    return f"{_mib(sent.bytes)} in {sent.calls}" if sent.calls else "-"
