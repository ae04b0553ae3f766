"""Where a matrix product finds its weight inside a parameter.

A parameter may be stored as (out, in), (in, out), (heads, in, out), (out, in, kh, kw), be one slice of a packed
matrix, or all of these at once. A `Layout` maps the region that one product uses to a stack of matrices ``(stack,
rows, columns)``, where rows are the product's outputs and columns its inputs, and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A region of a parameter, seen as a stack of (rows × columns) matrices.

    `box` holds a (start, stop) pair per parameter axis, or None for the whole parameter. The region, flattened as
    PyTorch counts, has axes `axes`, of
    which `stack_axes`, `row_axes` and `column_axes` make up the three axes of the matrix stack, whose sizes are
    `shape`.
    """

    name: str
    parameter_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...] | None
    axes: tuple[int, ...]
    stack_axes: tuple[int, ...]
    row_axes: tuple[int, ...]
    column_axes: tuple[int, ...]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(stack, rows, columns)."""
        stack, rows, columns = (
            math.prod(self.axes[axis] for axis in axes) for axes in (self.stack_axes, self.row_axes, self.column_axes)
        )
        return stack, rows, columns

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation of `axes` into stack, rows, columns."""
        return self.stack_axes + self.row_axes + self.column_axes

    @cached_property
    def _inverse(self) -> tuple[int, ...]:
        return tuple(self.order.index(axis) for axis in range(len(self.order)))

    @cached_property
    def is_in_order(self) -> bool:
        """Whether a reshape does it: nearly always, and this is done for every layer in every step."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def _region_shape(self) -> tuple[int, ...]:
        return self.parameter_shape if self.box is None else tuple(stop - start for start, stop in self.box)

    @cached_property
    def label(self) -> str:
        """The parameter's name, with the slice where only a part of it is covered: ``attn.in_proj_weight[0:8]``."""
        if self.box is None:
            return self.name
        slices = [
            ":" if (start, stop) == (0, size) else f"{start}:{stop}"
            for (start, stop), size in zip(self.box, self.parameter_shape, strict=True)
        ]
        while slices[-1] == ":":
            slices.pop()
        return f"{self.name}[{', '.join(slices)}]"

    @property
    def numel(self) -> int:
        """Elements covered."""
        return math.prod(self.shape)

    def region(self, tensor: Tensor) -> Tensor:
        """The covered part of a tensor shaped like the parameter, as a view."""
        if self.box is None:
            return tensor
        return tensor[tuple(slice(start, stop) for start, stop in self.box)]

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """(parameter shape) → (stack, rows, columns). A view where the memory allows it."""
        if self.is_in_order:
            return self.region(tensor).reshape(self.shape)
        return self.region(tensor).reshape(self.axes).permute(self.order).reshape(self.shape)

    def to_view(self, tensor: Tensor) -> Tensor:
        """The same as a view; a RuntimeError where the memory does not allow it."""
        return self.region(tensor).view(self.axes).permute(self.order).view(self.shape)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """(stack, rows, columns) → the shape of `region`."""
        if self.is_in_order:
            return matrix.reshape(self._region_shape)
        permuted = matrix.reshape([self.axes[axis] for axis in self.order]).permute(self._inverse)
        return permuted.reshape(self._region_shape)

    def overlaps(self, other: Layout) -> bool:
        """Whether two regions of one parameter share an element."""
        if self.name != other.name:
            return False
        if self.box is None or other.box is None:
            return True
        return all(a < d and c < b for (a, b), (c, d) in zip(self.box, other.box, strict=True))

    def transposed(self) -> Layout:
        """The same region with rows and columns exchanged."""
        return replace(self, row_axes=self.column_axes, column_axes=self.row_axes)

    def to_state(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Layout:
        """The inverse of `to_state`, also after a round through a file."""
        box = None if state["box"] is None else tuple((int(start), int(stop)) for start, stop in state["box"])
        sizes = {key: tuple(value) for key, value in state.items() if key not in ("name", "box")}
        return cls(name=state["name"], box=box, **sizes)


def whole(name: str, shape: Sequence[int], axes: Sequence[int], roles: str) -> Layout:
    """The whole parameter, unflattened to `axes`, with a role per axis: s(tack), r(ow) or c(olumn)."""
    layout = from_view(name, shape, axes, _contiguous(axes), 0, roles)
    assert layout is not None, "a whole parameter is always a dense box"
    return layout


def from_view(
    name: str,
    parameter_shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int,
    roles: str,
) -> Layout | None:
    """The layout of a strided view of a (contiguously counted) parameter, or None if the view is not a dense box of
    it.

    `roles` gives each axis of the view: s(tack), r(ow), c(olumn), or e for an expanded axis that repeats the
    weight.
    """
    return _from_view(name, tuple(parameter_shape), tuple(sizes), tuple(strides), offset, roles)


@lru_cache(maxsize=4096)  # asked for every parameter in every statistics step
def _from_view(
    name: str,
    parameter_shape: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    roles: str,
) -> Layout | None:
    kept = [
        (size, stride, role)
        for size, stride, role in zip(sizes, strides, roles, strict=True)
        if size != 1 and role != "e"
    ]
    if any(stride == 0 for _, stride, _ in kept):
        return None
    first = _unravel(offset, parameter_shape)
    last = _unravel(offset + sum((size - 1) * stride for size, stride, _ in kept), parameter_shape)
    extent = [b - a + 1 for a, b in zip(first, last, strict=True)]
    if any(e < 1 for e in extent) or math.prod(extent) != math.prod(size for size, _, _ in kept):
        return None
    box_strides = _contiguous(extent)
    inside = [
        (size, sum(d * s for d, s in zip(_unravel(stride, parameter_shape), box_strides, strict=True)), role)
        for size, stride, role in kept
    ]
    inside.sort(key=lambda axis: -axis[1])
    if [stride for _, stride, _ in inside] != list(_contiguous([size for size, _, _ in inside])):
        return None
    axes: list[int] = []
    merged_roles: list[str] = []
    for size, _, role in inside:
        # Neighbours in memory with one role are one axis, so that equal layouts compare equal however the view was
        # made.
        if merged_roles and merged_roles[-1] == role:
            axes[-1] *= size
        else:
            axes.append(size)
            merged_roles.append(role)
    stack_axes, row_axes, column_axes = (
        tuple(axis for axis, own in enumerate(merged_roles) if own == role) for role in "src"
    )
    # Axes of one role must appear in the matrix in the order in which they lie in memory.
    if any([r for _, _, r in kept].count(role) > 1 and not _in_memory_order(kept, role) for role in "src"):
        return None
    box = tuple((a, b + 1) for a, b in zip(first, last, strict=True))
    complete = all(pair == (0, size) for pair, size in zip(box, parameter_shape, strict=True))
    return Layout(
        name, tuple(parameter_shape), None if complete else box, tuple(axes), stack_axes, row_axes, column_axes
    )


def _in_memory_order(kept: list[tuple[int, int, str]], role: str) -> bool:
    strides = [stride for _, stride, own in kept if own == role]
    return strides == sorted(strides, reverse=True)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    coordinates = []
    for stride in _contiguous(shape):
        coordinates.append(index // stride)
        index %= stride
    return tuple(coordinates)


def positions(layouts: Sequence[Layout]) -> Tensor:
    """Which element of the concatenated matrices each element of the flattened, concatenated regions is.

    The matrices of `layouts` (the weight's, then the bias's column) stand side by side in one (stack, rows,
    columns) matrix; the result orders a
    dense block as PyTorch stores the parameters.
    """
    stack, rows, _ = layouts[0].shape
    columns = sum(layout.shape[2] for layout in layouts)
    index = torch.arange(stack * rows * columns).reshape(stack, rows, columns)
    parts = index.split([layout.shape[2] for layout in layouts], dim=2)
    return torch.cat([layout.from_matrix(part).flatten() for layout, part in zip(layouts, parts, strict=True)])
