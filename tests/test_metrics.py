"""Counts that the device keeps."""

from __future__ import annotations

import torch

from natgrad.metrics import Failures, Metrics


def test_what_did_not_come_out_right_is_counted() -> None:
    failures = Failures(2)
    assert int(failures) == 2
    right = torch.tensor(True)
    failures.add(right)
    assert int(failures) == 2
    failures.add(torch.tensor(False))
    assert int(failures) == 3
    failures.add(torch.tensor([True, False, False]).sum(), of=3)
    assert int(failures) == 5
    assert right.dtype == torch.bool  # the caller's own


def test_counts_go_on_from_a_checkpoint() -> None:
    metrics = Metrics()
    metrics.skipped_steps.add(torch.tensor(False))
    metrics.rejected_statistics.add(torch.tensor(1), of=4)
    metrics.failed_decompositions += 2
    state = metrics.state()
    assert (state["skipped_steps"], state["rejected_statistics"], state["failed_decompositions"]) == (1, 3, 2)
    for first in (True, False):
        again = Metrics()
        again.load(state, first=first)
        again.skipped_steps.add(torch.tensor(False))
        again.rejected_statistics.add(torch.tensor(0), of=1)
        assert again.state() == {
            **state,
            "skipped_steps": 2,
            "rejected_statistics": 4 if first else 1,
            "failed_decompositions": 2 if first else 0,
        }
