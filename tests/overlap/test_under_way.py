"""Checkpoints of runs with decompositions under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad
from distribute.mixed import Loop, Mixed, close
from natgrad.overlap.piles import Piles
from overlap.executors import Erratic, Held, digest, fingerprint, until
from overlap.test_staggered import Growing
from ranks import run_on_ranks

HALF, STEPS = 5, 12
# Asked for at 3, taken over at 7: under way at 5. The second has two under way.
CASES: list[dict[str, Any]] = [
    {"delay": 4, "inv_update_steps": 3},
    {"delay": 4, "inv_update_steps": 2, "solver": "inverse", "raw_momentum": 0.5},
    {"delay": 3, "inv_update_steps": 3, "max_factor_size": 6},
]


def save(rank: int, ranks: int, folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """Half of each run, saved, and its end."""
    ends = []
    for number, options in enumerate(cases):
        with Erratic(number).told() as erratic:
            loop = Loop(rank, ranks, overlap=erratic, **options).run(HALF)
            state = {"model": loop.model.state_dict(), "kfac": loop.kfac.state_dict()}
            assert len(state["kfac"]["under_way"]) > 0
            if rank == 0:
                torch.save(state, folder / f"{number}.pt")
            loop.run(STEPS, skip=HALF)
            ends.append((fingerprint(loop), loop.weights))
    return ends


def go_on(rank: int, ranks: int, folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    found = []
    for number, options in enumerate(cases):
        with Erratic(number + 50).told() as erratic:
            loop = Loop(rank, ranks, overlap=erratic, **options)
            state = torch.load(folder / f"{number}.pt", weights_only=True)
            loop.model.load_state_dict(state["model"])
            loop.kfac.load_state_dict(state["kfac"])
            assert digest(loop.kfac.state_dict()["under_way"]) == digest(state["kfac"]["under_way"])
            loop.run(STEPS, skip=HALF)
            found.append((fingerprint(loop), loop.weights))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_what_was_under_way(tmp_path, case):
    ((end, _),) = save(0, 1, tmp_path, [case])
    ((found, _),) = go_on(0, 1, tmp_path, [case])
    assert found == end
    assert fingerprint(Loop(0, 1, **case).run(STEPS)) == end  # saving changes nothing


ON_RANKS = [
    {**case, "strategy": strategy}
    for case, strategy in zip(CASES, ("comm-opt", "layer-wise", "layer-wise"), strict=True)
]


def test_ranks_go_on_with_what_was_under_way_and_so_does_one(tmp_path):
    for name in ("saved", "same"):
        (tmp_path / name).mkdir()
    saved = tmp_path / "saved"
    ends = run_on_ranks(save, saved, 2, saved, ON_RANKS)
    for answer in run_on_ranks(go_on, tmp_path / "same", 2, saved, ON_RANKS):
        for (found, _), (end, _) in zip(answer, ends[0], strict=True):
            assert found == end
    for (_, weights), (_, end) in zip(go_on(0, 1, saved, CASES), ends[0], strict=True):
        close(weights, end)


def test_what_one_saved_ranks_go_on_with(tmp_path):
    ends = save(0, 1, tmp_path, CASES)
    turned = ON_RANKS[1:] + ON_RANKS[:1]  # other strategies
    turned = [{**case, "strategy": other["strategy"]} for case, other in zip(CASES, turned, strict=True)]
    answers = run_on_ranks(go_on, tmp_path, 2, tmp_path, turned)
    for number, (_, end) in enumerate(ends):
        assert answers[0][number][0] == answers[1][number][0]
        close(answers[0][number][1], end)


def test_a_state_without_decompositions_has_none_under_way():
    options = CASES[0]
    loop = Loop(0, 1, **options).run(HALF)
    state = loop.kfac.state_dict(decompositions=False)
    assert state["under_way"] == []
    again = Loop(0, 1, **options)
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(state)
    assert {one.solved_at for one in again.kfac._preconditioner.solved.values()} == {HALF}
    again.run(STEPS, skip=HALF)


def test_what_was_under_way_before_loading_is_forgotten():
    held = Held()
    options = {"inv_update_steps": 3, "delay": 4}
    early = Loop(0, 1, **options).run(2)
    state = early.kfac.state_dict()
    loop = Loop(0, 1, overlap=held, **options).run(HALF)
    until(lambda: held.asked == 1)
    loop.model.load_state_dict(early.model.state_dict())
    loop.kfac.load_state_dict(state)
    assert len(loop.kfac._curvature.jobs) == 0
    loop.run(6, skip=2)
    early.run(6, skip=2)
    held.release()
    assert digest(loop.model.state_dict()) == digest(early.model.state_dict())


def test_who_loads_without_a_delay_goes_on_without():
    loop = Loop(0, 1, **CASES[0]).run(HALF)
    for options in ({}, {"overlap": "staggered"}, {"overlap": "background", "delay": "ready"}, {"delay": 1}):
        again = Loop(0, 1, inv_update_steps=3, **options)
        again.model.load_state_dict(loop.model.state_dict())
        again.kfac.load_state_dict(loop.kfac.state_dict())
        again.run(STEPS, skip=HALF)
        assert again.kfac.steps == STEPS


def test_a_checkpoint_leaves_what_is_under_way_where_it_is(monkeypatch):
    """Small solutions are sent in one piece when they are taken over, and not before."""
    sent = []
    own = Piles.sent
    monkeypatch.setattr(Piles, "sent", lambda piles: sent.append(piles) or own(piles))
    loop = Loop(0, 1, overlap=natgrad.Background("cpu", workers=1), **CASES[0]).run(HALF)
    assert len(loop.kfac.state_dict()["under_way"]) == 1
    assert sent == []
    plain = Loop(0, 1, overlap=natgrad.Background("cpu", workers=1), **CASES[0]).run(STEPS)
    assert len(sent) > 0
    assert fingerprint(loop.run(STEPS, skip=HALF)) == fingerprint(plain)


def test_who_loads_with_another_solver_decomposes_anew():
    loop = Loop(0, 1, **CASES[0]).run(HALF)
    again = Loop(0, 1, **CASES[0], solver="inverse")
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(loop.kfac.state_dict())
    assert len(again.kfac._curvature.jobs) == 0
    again.run(STEPS, skip=HALF)


def test_who_excludes_a_layer_goes_on_with_the_others():
    loop = Loop(0, 1, **CASES[0]).run(HALF)
    state = loop.kfac.state_dict()
    assert len(state["under_way"]) == 1
    again = Loop(0, 1, **CASES[0], exclude=["key.*", "mix.*"])
    again.model.load_state_dict(loop.model.state_dict())
    again.kfac.load_state_dict(state)
    again.run(STEPS, skip=HALF)
    assert "key.weight" not in again.kfac._preconditioner.solved


# Blocks that come and go between a request and its landing


class Changing(Growing):
    """Two layers share their input until they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = False

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.apart:
            return super().forward(tokens)
        x = self.words(tokens)
        attention = (self.query(x) @ self.key(2 * x).mT).softmax(-1)
        x = x + self.mix((attention @ x).mT).mT
        return self.out(torch.tanh(self.norm(x))) @ self.words.weight.T


def freeze(model: nn.Module) -> None:
    for parameter in model.key.parameters():
        parameter.requires_grad_(False)


def grow(model: nn.Module) -> None:
    model.grown = True


def part(model: nn.Module) -> None:
    model.apart = True


def freeze_bias(model: nn.Module) -> None:
    model.query.bias.requires_grad_(False)


CHANGES = {"frozen": freeze, "grown": grow, "apart": part, "without bias": freeze_bias}


def changed(rank: int, ranks: int, change: str, options: dict[str, Any]) -> list[Any]:
    """The change comes while a request is under way; the state is saved then, too."""
    prints = []
    for place in ("step", "cpu"):
        loop = Loop(rank, ranks, model=Changing(), overlap=natgrad.Background(place), **options).run(HALF)
        assert len(loop.kfac._curvature.jobs) > 0
        CHANGES[change](loop.model)
        loop.run(HALF + 1, skip=HALF)
        state = loop.kfac.state_dict()
        again = Loop(rank, ranks, model=Changing(), **options)
        again.model.load_state_dict(loop.model.state_dict())
        CHANGES[change](again.model)
        again.kfac.load_state_dict(state)
        for each in (loop, again):
            each.run(STEPS, skip=HALF + 1)
            prints.append((fingerprint(each), each.weights))
        assert loop.kfac.metrics()["background_failures"] == 0
    return prints


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_may_come_and_go_while_a_request_is_under_way(change, solver):
    prints = changed(0, 1, change, {"delay": 4, "inv_update_steps": 3, "solver": solver})
    assert len({one for one, _ in prints}) == 1


@pytest.mark.parametrize("change", ["grown", "apart"])
def test_blocks_may_come_and_go_on_ranks(tmp_path, change):
    for strategy in ("comm-opt", "layer-wise"):
        (tmp_path / strategy).mkdir()
        options = {"delay": 4, "inv_update_steps": 3, "strategy": strategy}
        answers = run_on_ranks(changed, tmp_path / strategy, 2, change, options)
        (loop, weights), (again, others), (background, _), (loaded, _) = answers[0]
        assert [one for one, _ in answers[1]] == [loop, again, background, loaded]
        assert (background, loaded) == (loop, again)
        close(weights, others)  # who does what is decided anew after loading


def test_a_layer_in_the_place_of_another_starts_anew():
    """Of another size, under the same name: what was under way is not for it."""
    loop = Loop(0, 1, model=Mixed(), overlap="background", delay=4, inv_update_steps=3).run(HALF)
    blocks = [block for block in loop.kfac.blocks if block.key != "out.weight"]
    loop.kfac._registry.replace(blocks)
    loop.run(STEPS, skip=HALF)
    assert loop.kfac._preconditioner.solved["out.weight"].solved_at > 3
    assert loop.kfac.metrics()["background_failures"] == 0


def test_what_was_under_way_and_is_not_finite_is_left_out(tmp_path):
    save(0, 1, tmp_path, CASES[:1])
    state = torch.load(tmp_path / "0.pt", weights_only=True)
    damaged, *whole = state["kfac"]["under_way"][0]["blocks"]
    state["kfac"]["under_way"][0]["blocks"][damaged]["scale"].fill_(float("nan"))
    loop = Loop(0, 1, overlap=natgrad.Background("step"), **CASES[0])
    loop.model.load_state_dict(state["model"])
    with pytest.warns(natgrad.NatgradWarning, match="decompositions of .* hold NaN or inf: they are left out"):
        loop.kfac.load_state_dict(state["kfac"])
    loop.run(8, skip=HALF)
    solved = {key: member.solved_at for key, member in loop.kfac._preconditioner.solved.items()}
    assert solved[damaged] == 0
    assert {solved[key] for key in whole} == {3}
    loop.run(STEPS, skip=8)
    assert loop.kfac.metrics()["skipped_steps"] == 0
    assert loop.kfac._preconditioner.solved[damaged].solved_at > 3
