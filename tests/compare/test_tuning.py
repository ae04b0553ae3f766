from __future__ import annotations

import itertools
import math

import pytest

from natgrad import recipes
from natgrad.compare.tuning import DECADES, Outcome, Rung, design, full_runs, rungs, shortened, sweep

SETTINGS = [{"lr": rate} for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)]


@pytest.mark.parametrize("centre", [{"lr": 0.123}, {"lr": 0.123, "damping": 1e-3}])
def test_a_design_begins_at_the_centre_stays_within_its_decades_and_its_beginning_does_not_depend_on_its_length(centre):
    settings = design(centre, 64)
    assert settings[0] == centre
    assert settings[:8] == design(centre, 8)
    for name, value in centre.items():
        logs = sorted(math.log10(one[name] / value) for one in settings)
        assert -DECADES[name] / 2 - 0.03 <= logs[0] < -DECADES[name] / 2 * 0.9
        assert DECADES[name] / 2 * 0.9 < logs[-1] <= DECADES[name] / 2 + 0.03
        largest_gap = max(after - before for before, after in itertools.pairwise(logs))
        assert largest_gap < 4 * DECADES[name] / 64  # evenly


def test_a_design_fills_two_dimensions_evenly():
    settings = design({"lr": 1.0, "damping": 1.0}, 64)
    quarters = {(one["lr"] > 1, one["damping"] > 1): 0 for one in settings}
    for one in settings:
        quarters[one["lr"] > 1, one["damping"] > 1] += 1
    assert all(12 <= count <= 20 for count in quarters.values())


def test_rungs_halve_the_settings_and_double_the_epochs_up_to_half_of_the_training():
    assert rungs(8, 16) == [Rung(8, 2), Rung(4, 4), Rung(2, 8)]
    assert full_runs(rungs(8, 16), 16) == 3
    assert rungs(5, 20) == [Rung(5, 2), Rung(3, 5), Rung(2, 10)]
    assert rungs(2, 20) == [Rung(2, 10)]


def test_one_trial_is_no_sweep_and_rungs_that_would_only_repeat_are_left_out():
    assert rungs(1, 20) == []
    assert design({}, 8)[0] == {}
    assert rungs(8, 1) == [Rung(8, 1)]
    assert rungs(8, 3) == [Rung(8, 1), Rung(2, 2)]
    assert sweep([{"lr": 0.1}], [], lambda *one: None).settings == {"lr": 0.1}


def test_a_sweep_keeps_the_better_half_and_chooses_the_best_of_the_last_rung():
    asked = []

    def outcome(index, level, settings):
        asked.append((level, index))
        # The best of the first rung is the worst of the last.
        return Outcome(settings["lr"] if level < 2 else -settings["lr"])

    found = sweep(SETTINGS, rungs(8, 16), outcome)
    assert [index for level, index in asked if level == 0] == list(range(8))
    assert [index for level, index in asked if level == 1] == [0, 1, 2, 3]
    assert [index for level, index in asked if level == 2] == [0, 1]
    assert found.settings == {"lr": 0.2}
    assert [trial.chosen for trial in found.trials] == [False, True, *[False] * 6]
    assert found.trials[0].rungs == ((2, 0.1), (4, 0.1), (8, -0.1))
    assert found.complete


def test_ties_are_broken_by_the_loss_and_then_by_the_order():
    found = sweep(SETTINGS[:2], rungs(2, 2), lambda index, *_: Outcome(0.1, tie_break=-index))
    assert found.settings == SETTINGS[1]
    assert sweep(SETTINGS[:2], rungs(2, 2), lambda *_: Outcome(0.1)).settings == SETTINGS[0]


def test_settings_that_failed_go_no_further_and_say_why():
    def outcome(index, level, settings):
        return Outcome(None, note="diverged") if index < 6 else Outcome(settings["lr"])

    found = sweep(SETTINGS, rungs(8, 16), outcome)
    assert found.settings == {"lr": 0.7}
    assert found.trials[0].note == "diverged"
    assert found.trials[0].rungs == ((2, None),)


def test_where_all_fail_nothing_is_chosen():
    found = sweep(SETTINGS, rungs(8, 16), lambda *_: Outcome(None, note="crashed"))
    assert found.settings is None
    assert found.complete
    assert len(found.trials) == 8


def test_a_sweep_that_is_not_at_its_end_has_what_it_has_and_chooses_nothing():
    found = sweep(SETTINGS, rungs(8, 16), lambda index, level, _: Outcome(0.1) if index < 3 else None)
    assert found.settings is None
    assert not found.complete
    assert len(found.trials) == 3


def test_a_shortened_recipe_is_a_whole_training_with_its_schedules_squeezed():
    recipe = recipes.load(
        "digits",
        [
            "training.steps=100",
            'optimizer.lr={schedule="steps", value=0.1, factor=0.1, at=[8, 16], warmup=2}',
            'kfac.damping={schedule="exponential", value=0.01, factor=0.5, every=4}',
            'kfac.kl_clip={schedule="cosine", value=0.01, end=1e-6}',
        ],
    )
    short = shortened(recipe, 5)
    assert (short.training.epochs, short.training.steps) == (5, 25)
    assert short.optimizer.lr == {"schedule": "steps", "value": 0.1, "factor": 0.1, "at": [2.0, 4.0], "warmup": 0.5}
    assert short.kfac.damping["every"] == 1.0
    assert short.kfac.kl_clip == {"schedule": "cosine", "value": 0.01, "end": 1e-6}  # over all epochs, however many
    assert shortened(recipe, 20) == recipe
