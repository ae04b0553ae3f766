"""Whether a model still has the modules and parameters that it had."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn


class Structure:
    """All modules of a model, and by name what they have, as it is now: their children and, where asked for, their
    `parameters`. These are known as objects, which it keeps alive.
    """

    def __init__(self, model: nn.Module, *, parameters: bool) -> None:
        self.modules = _modules(model)
        self._with_parameters = parameters
        tables = self._tables()
        # Scripted modules make up what they have whenever they are asked: nobody can tell whether it is the same.
        self._lasts = all(isinstance(table, dict) for table in tables)
        self._sizes = list(map(len, tables))
        self._names = list(chain.from_iterable(tables)) if self._lasts else []
        self._parts = list(chain.from_iterable(map(dict.values, tables))) if self._lasts else []

    @property
    def is_present(self) -> bool:
        """Whether nothing has changed. Models have hundreds of modules: all loops are C's."""
        if not self._lasts:
            return False
        tables = self._tables()
        return (
            list(map(len, tables)) == self._sizes
            and list(chain.from_iterable(tables)) == self._names
            and all(map(is_, self._parts, chain.from_iterable(map(dict.values, tables))))
        )

    def _tables(self) -> list[dict[str, Any]]:
        children = [module._modules for module in self.modules]
        return children + [module._parameters for module in self.modules] if self._with_parameters else children


def _modules(model: nn.Module) -> list[nn.Module]:
    """``model.modules()``, without the names that it makes on the way."""
    found, seen = [model], {model}
    for module in found:
        children: Iterable[nn.Module | None] = module._modules.values()
        for child in children:
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found
