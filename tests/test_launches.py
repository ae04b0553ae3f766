"""Tables of kernels, without a GPU."""

from __future__ import annotations

import torch

from natgrad.launches import Launch, addresses
from natgrad.statistics.moving import numbers

CPU = torch.device("cpu")


def test_each_program_finds_its_piece() -> None:
    given: list[torch.Tensor] = []

    class Kernel:
        arg_names = ("pointers", "table", "owners", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert grid == (6, 1, 1)
            return lambda *arguments, **options: given.extend(arguments)

    with torch.device("meta"):  # a user's default device
        pointers = addresses([1, 2**40], CPU)
        Launch(Kernel(), [(7, 8), (9, 10)], [2, 4], CPU, BLOCK=16)(pointers)
        assert numbers([0.5], CPU).tolist() == [0.5]
    assert given[0].tolist() == [1, 2**40]
    assert given[1].tolist() == [[0, 7, 8], [2, 9, 10]]
    assert given[2].tolist() == [0, 0, 1, 1, 1, 1]
