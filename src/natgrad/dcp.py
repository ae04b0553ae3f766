"""K-FAC's state in a checkpoint of `torch.distributed.checkpoint`, which reads into what is there already: a KFAC that
has not seen a batch has nothing to read into.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

# What may be empty, and is then not written.
_EMPTY = {
    "schedules": (),
    "blocks": (),
    "decompositions": (),
    "buffers": ("momentum", "first", "second", "count"),
}


def read_dcp(path: str | os.PathLike[str], key: str = "kfac") -> dict[str, Any]:
    """What ``dcp.save({key: kfac.state_dict(), ...}, checkpoint_id=path)`` wrote, for ``kfac.load_state_dict``; on the
    CPU, on every rank that asks, whatever their number.
    """
    reader = FileSystemReader(Path(path))
    try:
        metadata = reader.read_metadata()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} holds no checkpoint of torch.distributed.checkpoint") from None
    places = {name: place for name, place in (metadata.planner_data or {}).items() if place[0] == key}
    if not places:
        known = sorted({str(place[0]) for place in (metadata.planner_data or {}).values()})
        raise KeyError(f"the checkpoint in {path} has no {key!r}; it has {', '.join(known) or 'nothing'}")
    flat: dict[str, Any] = {}
    for name in places:
        stored = metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        else:
            flat[name] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # every rank for itself is what is meant
        load(flat, storage_reader=reader, planner=_Planner(flatten_state_dict=False), no_dist=True)
    whole: dict[Any, Any] = {}
    for name, place in places.items():
        inner = whole
        for step in place[:-1]:
            inner = inner.setdefault(step, {})
        inner[place[-1]] = flat[name]
    state: dict[str, Any] = _with_lists(whole)[key]
    for field, inner_fields in _EMPTY.items():
        table = state.setdefault(field, {})
        for one in inner_fields:
            table.setdefault(one, {})
    return state


class _Planner(DefaultLoadPlanner):
    """Reads nothing but tensors, numbers, texts and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _with_lists(value: Any) -> Any:
    """Tables whose keys are places become lists."""
    if not isinstance(value, dict):
        return value
    inner = {name: _with_lists(one) for name, one in value.items()}
    if inner and all(isinstance(name, int) for name in inner):
        return [inner[number] for number in sorted(inner)]
    return inner
