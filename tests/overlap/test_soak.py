"""A few hundred steps with somebody unreliable; `python -m benchmarks.soak` takes thousands."""

from __future__ import annotations

import pytest
from benchmarks import soak

from ranks import run_on_ranks


@pytest.mark.slow
def test_unreliable_help_leaves_nothing_behind_and_replicas_the_same(tmp_path):
    for phases in run_on_ranks(soak.on_rank, tmp_path, 2, 240, 3, seconds=120):
        assert len(phases) == len(soak.PHASES)
        for phase in phases:
            assert soak.judged(phase) == []
            assert phase.compared == 2
            assert phase.failures > 0
