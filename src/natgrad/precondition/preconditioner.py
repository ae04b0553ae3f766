"""From blocks to preconditioned gradients: which sides are solved when, how they are stacked, and what is written
where.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.blocks.kronecker import Estimate, KroneckerBlock, Whole
from natgrad.capture.layout import Layout
from natgrad.launches import HOST
from natgrad.precondition.clip import Clip, clip
from natgrad.precondition.fused import Fused, fused, lie
from natgrad.precondition.preparing import Preparation, prepares
from natgrad.precondition.rates import LearningRate, Rates, rates_of, squared_length
from natgrad.precondition.replay import Replay
from natgrad.precondition.stack import Bank, SolvedBlock, Stack
from natgrad.solve.solver import Side, Solved, damped_sides, solve, update_all
from natgrad.undisturbed import undisturbed

THREADS = 8
"""Of eigendecompositions that training waits for, on a GPU."""

_TURNS = 128
"""Of blocks that are decomposed together: where they take turns there are some."""
_CHANGES = 32
"""Of gradients, more often than not, after which they are done without kernels of their own."""
_KINDS = 8
"""Of gradients that kernels are prepared for at a time: some may be missing now and then."""

Shape = tuple[tuple[int, ...], torch.dtype]
Keys = Callable[[KroneckerBlock], tuple[Hashable, ...]]


class Directions(Protocol):
    """The exchange of a step's directions."""

    def complete(self, own: Mapping[str, Tensor], length: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The directions of all solved blocks, of which `own` are this rank's, and the sum of all squared lengths."""


class Others(Protocol):
    """The other ranks, of which each does a part of the work: see `natgrad.distribute.spread`."""

    def solves(self, key: Hashable) -> bool:
        """Whether a side is decomposed here."""

    def holds(self, block: KroneckerBlock) -> bool:
        """Whether a block is preconditioned here."""

    @property
    def apart(self) -> bool:
        """Whether some blocks are preconditioned elsewhere."""

    @property
    def placed(self) -> Any:
        """Who does what, at present."""

    def share_solutions(
        self, like: Mapping[Hashable, Tensor], sides: dict[Hashable, Side], solver: str, placed: Any
    ) -> None:
        """Completes the sides of the blocks that are held here, as they were `placed` when they were asked for."""

    def expect_directions(self, solved: Mapping[str, Shape]) -> Directions:
        """The exchange of a step's directions, before this rank has made its own."""

    def total(self, own: Tensor) -> Tensor:
        """The sum over teams of a number that every member has."""


@dataclass
class Request:
    """What is to be decomposed: the `factors` of sides, as they were at a step, and the sides' keys and the scales of
    the blocks that the solutions belong to. On several ranks the factors are this one's share, `shapes` has tensors
    like all sides, and `placed` says who does what.
    """

    step: int
    factors: dict[Hashable, Tensor]
    keys: dict[KroneckerBlock, tuple[Hashable, ...]]
    scales: dict[KroneckerBlock, Tensor]
    shapes: dict[Hashable, Tensor]
    placed: Any

    def still(self, present: Iterable[KroneckerBlock], keys: Keys) -> Request:
        """What is left of it where blocks have gone, or got other factors, since."""
        left = [block for block in present if block in self.scales and keys(block) == self.keys[block]]
        named = {key for block in left for key in self.keys[block]}
        return Request(
            self.step,
            {key: factor for key, factor in self.factors.items() if key in named},
            {block: self.keys[block] for block in left},
            {block: self.scales[block] for block in left},
            {key: shape for key, shape in self.shapes.items() if key in named},
            self.placed,
        )


@dataclass(frozen=True)
class _Rates:
    """The learning rates that were found for some stacks, by the function that was given."""

    stacks: list[Stack]
    given: Callable[[str], LearningRate] | None
    found: list[Rates]


class Preconditioner:
    """The solved sides of all blocks, and the products with them, by compiled code where asked for. `others` are the
    ranks that share the work; `solved` has their blocks too, without sides.
    """

    def __init__(
        self,
        solver: str,
        rule: str,
        *,
        compiled: bool = False,
        cuda_graph: bool = True,
        others: Others | None = None,
    ) -> None:
        self.solver = solver
        self.rule = rule
        self.others = others
        self.decompositions = 0  # sides that this process has decomposed so far
        self.missing: set[str] = set()  # blocks that a checkpoint had no solutions of
        self._compiled = torch.compile(self._replace) if compiled else None
        # Not the method itself: a cycle would keep decompositions and graphs until the next garbage collection.
        self._compiled_directions = torch.compile(self._directions) if compiled else None
        self._preparations: dict[tuple[int, ...], Preparation] = {}
        self._changes = 0  # kinds of gradients that were new, less those that were not
        self._arithmetics: list[tuple[object, Fused | None]] = []  # with how gradients lie; the last one comes first
        self._rates = _Rates([], None, [])
        self._replay = Replay() if cuda_graph and not compiled else None
        self.solved: dict[str, SolvedBlock] = {}
        self._sides: dict[Hashable, Side] = {}
        self._shapes: dict[Hashable, Tensor] = {}  # on several ranks, of all sides
        self._stacks: list[Stack] | None = None  # not made yet
        self._uncovered: dict[str, Tensor] = {}  # elements outside the slices that blocks cover

    def keys(self, block: KroneckerBlock) -> tuple[Hashable, ...]:
        """What names a block's sides. Eigenbases belong to factors, and are shared with them; damped inverses to
        blocks.
        """
        if self.solver == "eigen" and block.swapped is None:
            return tuple(block.straight.sides)
        return tuple((block.key, number) for number in range(len(block.straight.sides)))

    def refresh(self, blocks: Iterable[KroneckerBlock], damping: float, step: int, whole: Whole | None = None) -> int:
        """Decomposes the blocks' present factors, on several ranks (which have the `whole` together) this one's share.
        Returns how many failed and kept their last good form.
        """
        request = self.prepare(blocks, damping, step, whole)
        return self.install(request, solve(request.factors, self.solver, threads=THREADS))

    @torch.no_grad()
    def prepare(
        self, blocks: Iterable[KroneckerBlock], damping: float, step: int, whole: Whole | None = None
    ) -> Request:
        """The blocks' factors as they are now, to be decomposed here, now or later."""
        others = self.others
        blocks = list(blocks)
        request = Request(step, {}, {}, {}, {}, None if others is None else others.placed)
        if others is None and whole is None and blocks and prepares(blocks):
            prepared = self._preparation(blocks).run(damping)
            request.factors.update(prepared.factors)
            request.scales.update(zip(blocks, prepared.scales, strict=True))
            request.keys.update((block, self.keys(block)) for block in blocks)
            return request
        for block in blocks:
            estimate = block.estimate(whole)
            sides, scale = self._prepare(estimate, damping)
            request.scales[block], request.keys[block] = scale, self.keys(block)
            own = dict(zip(self.keys(block), sides, strict=True))
            request.factors.update({key: side for key, side in own.items() if others is None or others.solves(key)})
            if others is not None:
                request.shapes.update(_shapes(block, self.keys(block), whole))
        return request

    def _preparation(self, blocks: Sequence[KroneckerBlock]) -> Preparation:
        """The same object for the same blocks."""
        key = tuple(map(id, blocks))
        if key not in self._preparations:
            if len(self._preparations) >= _TURNS:
                self._preparations.clear()
            self._preparations[key] = Preparation(
                blocks, [self.keys(block) for block in blocks], self.solver, self.rule
            )
        return self._preparations[key]

    @torch.no_grad()
    def install(self, request: Request, result: Solved) -> int:
        """Takes over what a request has led to; all ranks together, which send each other what they need. Returns how
        many failed.
        """
        others = self.others
        self.decompositions += len(request.factors)
        moved: list[tuple[Side, Side]] = []
        for key in request.factors:
            side = result.sides[key]
            present = self._sides.get(key)
            if present is None or not present.is_like(side):
                # Some are decomposed on cores, and blocks' scales are where they belong.
                self._sides[key] = side.to(next(iter(request.scales.values())).device)
            elif any(result.failed[key]):
                present.update(side, result.failed[key])
            else:
                moved.append((present, side))
        update_all(moved)
        if others is not None:
            self._shapes |= request.shapes
            held = {key for block, keys in request.keys.items() if others.holds(block) for key in keys}
            like = {key: shape for key, shape in request.shapes.items() if key in held}
            others.share_solutions(like, self._sides, self.solver, request.placed)
        scales = [
            (self._install(block, scale, request.step, held=others is None or others.holds(block)), scale)
            for block, scale in request.scales.items()
        ]
        old, new = [own for own, _ in scales if own is not None], [scale for own, scale in scales if own is not None]
        if old:
            torch._foreach_copy_(old, new)
        return sum(sum(result.failed[key]) for key in request.factors)

    def _prepare(self, estimate: Estimate, damping: float) -> tuple[tuple[Tensor, ...], Tensor]:
        if self.solver == "eigen":
            return estimate.sides, estimate.scale
        return damped_sides(estimate, self.rule, damping)

    def _install(self, block: KroneckerBlock, scale: Tensor, step: int, *, held: bool) -> Tensor | None:
        """Returns the scale that the new one is to be copied to, where there is one."""
        sides = tuple(self._sides[key] for key in self.keys(block)) if held else ()
        present = self.solved.get(block.key)
        if present is not None and (present.block, present.sides) == (block, sides):
            present.solved_at = step
            return present.scale
        self.solved[block.key] = SolvedBlock(block, sides, scale.clone(), step)
        self._stacks = None
        return None

    def adopt(self, block: KroneckerBlock, sides: Sequence[Side], scale: Tensor, solved_at: int) -> None:
        """Takes a solution from a checkpoint; sides that blocks share are kept once. No sides: it is held elsewhere."""
        if sides:
            for key, side in zip(self.keys(block), sides, strict=True):
                self._sides.setdefault(key, side)
                part = side.values if side.matrix is None else side.matrix
                assert part is not None, "a side has a matrix or values"
                self._shapes[key] = part
        before = self._install(block, scale, solved_at, held=bool(sides))
        if before is not None:
            before.copy_(scale)

    def release(self) -> None:
        """Lets go of the solutions that other ranks hold."""
        assert self.others is not None, "there are other ranks"
        for key, member in self.solved.items():
            if not self.others.holds(member.block):
                self.solved[key] = SolvedBlock(member.block, (), member.scale.clone(), member.solved_at)
        held = {name for member in self.solved.values() if member.sides for name in self.keys(member.block)}
        self._sides = {name: side for name, side in self._sides.items() if name in held}
        self._stacks = None

    @property
    def sides(self) -> Mapping[Hashable, Side]:
        """The solved sides that this process has, by key."""
        return self._sides

    def shapes(self) -> dict[Hashable, Tensor]:
        """For every side of every solved block, held here or not, a tensor of its shape and dtype."""
        named = [
            pair
            for member in self.solved.values()
            for pair in zip(self.keys(member.block), member.block.straight.sides, strict=True)
        ]
        # A factor that has become separate since is like the common one.
        return {key: self._shapes.get(key, factor.sum) for key, factor in named}

    def keep_only(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Forgets what belongs to blocks that are no more; sides that became separate start from their common past."""
        present = {block.key: block for block in blocks}
        sides: dict[Hashable, Side] = {}
        solved: dict[str, SolvedBlock] = {}
        for key, old in self.solved.items():
            block = present.get(key)
            if block is not old.block:
                continue  # gone, or another one under the same name
            if not old.sides:
                solved[key] = old
                continue
            for name, side in zip(self.keys(old.block), old.sides, strict=True):
                taken = any(side is other for other in sides.values())
                if name not in sides:
                    sides[name] = _copied(side) if taken else side
            own = tuple(sides[name] for name in self.keys(old.block))
            solved[key] = SolvedBlock(old.block, own, old.scale, old.solved_at)
        self._sides, self.solved, self._stacks = sides, solved, None
        self._preparations.clear()

    @torch.no_grad()
    def precondition(
        self,
        gradients: Mapping[str, Tensor | None],
        *,
        damping: float,
        kappa: float | None,
        learning_rate: Callable[[str], LearningRate],
        finite: Tensor | None = None,
        norms: Mapping[str, Tensor] | None = None,
    ) -> Clip | None:
        """Replaces the gradients of all solved blocks, in place, by the damped natural gradient, clipped; None where
        there is nothing to do.

        Where they are not finite, or `finite` says that other gradients are not, they become zero. `norms`, where
        given, holds tensors whose norm each block's direction takes over (grafting). `learning_rate` is another
        function wherever it gives other numbers.
        """
        stacks = [stack for stack in self._present_stacks() if stack.has_gradient(gradients)]
        apart = self.others is not None and self.others.apart and bool(self.solved)
        if not stacks and not apart:
            return None
        rates = self._rates_of(stacks, learning_rate)
        if apart:
            clipped = self._replace_together(stacks, gradients, damping, kappa, rates, finite, norms)
        elif self._compiled is None:
            clipped = self._replayed(stacks, gradients, damping, kappa, rates, finite, norms)
        else:
            # Numbers as tensors: compiled code must not be made anew for every value of a schedule.
            number = self._numbers()
            cap = None if kappa is None else number(kappa)
            tensors = [number(one) if isinstance(one, float) else one for one in rates]
            clipped = self._compiled(stacks, gradients, number(damping), cap, tensors, finite, norms)
        for name, mask in self._uncovered.items():
            # A raw gradient at a natural gradient's learning rate is no step to take.
            if (whole := gradients[name]) is not None:
                self._uncovered[name] = mask.to(whole.device)
                whole.masked_fill_(self._uncovered[name], 0)
        return clipped

    def _replayed(
        self,
        stacks: Sequence[Stack],
        gradients: Mapping[str, Tensor | None],
        damping: float,
        kappa: float | None,
        rates: Sequence[Rates],
        finite: Tensor | None,
        norms: Mapping[str, Tensor] | None,
    ) -> Clip:
        """By kernels of their own where that can be, and by a CUDA graph; else launch by launch."""
        device = stacks[0].device
        if norms is not None or device.type != "cuda":
            return self._replace(stacks, gradients, damping, kappa, rates, finite, norms)
        with torch.cuda.device(device):  # a graph is of the current one, whatever the gradients are on
            fused = self._fused(stacks, gradients)
            clipped = None
            if self._replay is not None:
                clipped = self._replay.run(self._replace, stacks, gradients, damping, kappa, rates, finite, fused)
            if clipped is None and fused is not None:
                clipped = fused.run(fused.memory(lasting=False), gradients, damping, kappa, rates, finite)
        return self._replace(stacks, gradients, damping, kappa, rates, finite, None) if clipped is None else clipped

    def _fused(self, stacks: Sequence[Stack], gradients: Mapping[str, Tensor | None]) -> Fused | None:
        """The kernels for gradients that lie as these do; the same object as long as they do."""
        # Compared with the last ones, not looked up: a hash of so much takes longer.
        key = (list(map(id, stacks)), lie(gradients[name] for stack in stacks for name in stack.names))
        known = next((number for number, (other, _) in enumerate(self._arithmetics) if other == key), None)
        self._changes = self._changes + 1 if known is None else max(0, self._changes - 1)
        if self._changes > _CHANGES:
            return None  # gradients come and go in ever new ways: tables would be made in every step
        if known is None:
            if len(self._arithmetics) >= _KINDS:
                self._arithmetics.clear()
            self._arithmetics.insert(0, (key, fused(stacks, gradients, self.solver, self.rule)))
        elif known > 0:
            self._arithmetics.insert(0, self._arithmetics.pop(known))
        return self._arithmetics[0][1]

    def _rates_of(self, stacks: list[Stack], learning_rate: Callable[[str], LearningRate]) -> list[Rates]:
        """The same as the last time, for the same stacks and rates."""
        last = self._rates
        if learning_rate is not last.given or len(stacks) != len(last.stacks) or not all(map(is_, stacks, last.stacks)):
            last = self._rates = _Rates(stacks, learning_rate, [rates_of(stack, learning_rate) for stack in stacks])
        return last.found

    def _numbers(self) -> _Numbers:
        return _Numbers(next(iter(self.solved.values())).scale)

    def _present_stacks(self) -> list[Stack]:
        if self._stacks is None:
            if self._replay is not None:
                self._replay.clear()
            self._arithmetics.clear()
            self._rates = _Rates([], None, [])
            self._changes = 0
            self._stacks = _stacked(member for member in self.solved.values() if member.sides)
            self._uncovered = _uncovered([layout for one in self.solved.values() for layout in one.block.layouts])
        return self._stacks

    @torch.no_grad()
    def quadratic(self, direction: Mapping[str, Tensor], damping: float) -> Tensor:
        """δᵀF̂δ with the damping in F̂ (0 for none), for a direction δ by parameter name.

        What is left out of it does not move, and what no block covers has no curvature. Eigenbases are those of the
        last refresh; inverses cannot tell, and the factors as they are now do.
        """
        blocks = [member.block for member in self.solved.values() if member.sides]
        still: dict[str, Tensor | None] = {layout.name: None for block in blocks for layout in block.layouts}
        moving = {**still, **direction}
        some = next(iter(direction.values()))
        with undisturbed(some.device):
            if self.solver == "eigen":
                stacks = [stack for stack in self._present_stacks() if stack.has_gradient(moving)]
                lengths = [stack.quadratic(moving, self.rule, damping) for stack in stacks]
            else:
                lengths = [
                    block.quadratic(moving, Estimate(*damped_sides(block.estimate(), self.rule, damping)))
                    for block in blocks
                    if any(moving[layout.name] is not None for layout in block.layouts)
                ]
        own = torch.stack(lengths).sum() if lengths else torch.zeros((), dtype=torch.float64, device=some.device)
        return own if self.others is None or not self.others.apart else self.others.total(own)

    def _replace(
        self,
        stacks: Sequence[Stack],
        gradients: Mapping[str, Tensor | None],
        damping: float | Tensor,
        kappa: float | Tensor | None,
        rates: Sequence[Rates],
        finite: Tensor | None,
        norms: Mapping[str, Tensor] | None,
    ) -> Clip:
        """All arithmetic of a step, from the gradients' memory back into it."""
        directions, length = self._directions(stacks, gradients, damping, rates, norms)
        clipped = clip(length, kappa)
        if finite is not None:
            clipped = replace(clipped, finite=clipped.finite & finite)
        for stack, direction in zip(stacks, directions, strict=True):
            # Into the gradients' own memory: DDP's buckets are views of it.
            torch._foreach_copy_(*stack.scatter(_clipped(direction, clipped), gradients))
        return clipped

    def _directions(
        self,
        stacks: Sequence[Stack],
        gradients: Mapping[str, Tensor | None],
        damping: float | Tensor,
        rates: Sequence[Rates],
        norms: Mapping[str, Tensor] | None,
    ) -> tuple[list[Tensor], Tensor]:
        """The stacks' directions before the clip, and α² vᵀ∇ of them all."""
        directions: list[Tensor] = []
        lengths: list[Tensor] = []
        for stack, rate in zip(stacks, rates, strict=True):
            gradient = stack.gather(gradients)
            direction = stack.apply(gradient, self.solver, self.rule, damping)
            if norms is not None:
                ratio = stack.ratio_of_norms(direction, norms)[:, None, None]
                direction = direction * ratio
                gradient = gradient * ratio  # vᵀF̂v of a direction that is r times as long: r² vᵀ∇
            directions.append(direction)
            lengths.append(squared_length(stack, gradient * direction, rate))
        return directions, torch.stack(lengths).sum()

    def _replace_together(
        self,
        stacks: Sequence[Stack],
        gradients: Mapping[str, Tensor | None],
        damping: float,
        kappa: float | None,
        rates: Sequence[Rates],
        finite: Tensor | None,
        norms: Mapping[str, Tensor] | None,
    ) -> Clip:
        """The same with ranks that have preconditioned other blocks: every direction comes from one team."""
        assert self.others is not None, "there are other ranks"
        blocks = {key: member.block for key, member in self.solved.items()}
        shapes = {key: (block.shape, block.straight.row.sum.dtype) for key, block in blocks.items()}
        exchange = self.others.expect_directions(shapes)
        own: dict[str, Tensor] = {}
        length = next(iter(self.solved.values())).scale.new_zeros((), dtype=torch.float64)
        if stacks:
            compiled = self._compiled_directions
            number = self._numbers()
            directions, length = (compiled or self._directions)(
                stacks,
                gradients,
                number(damping) if compiled else damping,
                [number(one) if compiled and isinstance(one, float) else one for one in rates],
                norms,
            )
            for stack, direction in zip(stacks, directions, strict=True):
                parts = stack.members_parts(direction)
                own |= {m.block.key: part for m, part in zip(stack.members, parts, strict=True)}
        for key, member in self.solved.items():  # what has no gradient now
            if member.sides and key not in own:
                own[key] = torch.zeros(shapes[key][0], dtype=shapes[key][1], device=member.scale.device)
        found, total = exchange.complete(own, length)
        clipped = clip(total, kappa)
        if finite is not None:
            clipped = replace(clipped, finite=clipped.finite & finite)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for key, direction in found.items():
            layouts = blocks[key].layouts
            columns = _clipped(direction, clipped).split([layout.shape[2] for layout in layouts], dim=2)
            for layout, part in zip(layouts, columns, strict=True):
                if (gradient := gradients[layout.name]) is not None:
                    targets.append(layout.region(gradient))
                    sources.append(layout.from_matrix(part))
        torch._foreach_copy_(targets, sources)
        return clipped


def _clipped(direction: Tensor, clipped: Clip) -> Tensor:
    return torch.where(clipped.finite, direction * clipped.factor.to(direction.dtype), 0.0)


def _shapes(block: KroneckerBlock, keys: Sequence[Hashable], whole: Whole | None) -> dict[Hashable, Tensor]:
    """For every side of a block's estimate a tensor of its shape and dtype, without memory of its own."""
    known = [orientation for orientation in block.orientations if orientation.known(whole)]
    # Of both orientations, where both are known: dense if either is.
    sides = [[f.sum for f in (reversed(o.sides) if o is block.swapped else o.sides)] for o in known]
    return dict(zip(keys, [max(each, key=torch.Tensor.dim) for each in zip(*sides, strict=True)], strict=True))


class _Numbers:
    """Numbers as tensors on the device of another one; equal numbers are one tensor."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._made: dict[float, Tensor] = {}

    def __call__(self, value: float) -> Tensor:
        if value not in self._made:
            # Filled on the device: no copy from the host.
            self._made[value] = torch.full((), value, dtype=torch.float64, device=self._like.device)
        return self._made[value]


def _uncovered(layouts: Iterable[Layout]) -> dict[str, Tensor]:
    """Of parameters that blocks cover in slices: which elements lie in none of them."""
    outside: dict[str, Tensor] = {}
    for layout in layouts:
        if layout.box is not None:
            mask = outside.setdefault(layout.name, torch.ones(layout.parameter_shape, dtype=torch.bool, device=HOST))
            layout.region(mask).fill_(False)
    return {name: mask for name, mask in outside.items() if bool(mask.any())}


def _copied(side: Side) -> Side:
    return Side(*(None if part is None else part.clone() for part in (side.matrix, side.values)))


def _stacked(solved: Iterable[SolvedBlock]) -> list[Stack]:
    """Groups solved blocks by shape, and their sides by size."""
    groups: dict[Hashable, list[SolvedBlock]] = {}
    for member in solved:
        key = (member.block.shape[1:], member.block.bias is None, *map(_form, member.sides))
        groups.setdefault(key, []).append(member)
    banks: dict[Hashable, Bank] = {}
    for members in groups.values():
        for sides in zip(*(member.sides for member in members), strict=True):
            banks.setdefault(_form(sides[0]), Bank()).add(sides)
    for bank in banks.values():
        bank.close()
    return [Stack(members, [banks[_form(side)] for side in members[0].sides]) for members in groups.values()]


def _form(side: Side) -> Hashable:
    """Sides of one form can be joined."""
    return tuple(
        None if part is None else (part.shape[1:], part.dtype, part.device) for part in (side.matrix, side.values)
    )
