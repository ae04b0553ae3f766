from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from compare.made import comparison, contender, kfac, run, sgd
from natgrad.compare.arrivals import (
    CHANCE,
    Measure,
    Target,
    arrival,
    best_of,
    clear_first,
    duration,
    fastest,
    measure_of,
    natural_target,
    order,
    row_of,
)
from natgrad.compare.history import Trial
from natgrad.compare.verdict import judge

ERROR, LOSS = Measure(), Measure(what="loss")
PLAIN = "the best without K-FAC"


# Arrivals


def test_a_run_arrives_at_its_first_test_at_the_target_or_below_and_stays_arrived():
    there = arrival(run([0.5, 0.3, 0.1, 0.2]), ERROR, 0.3)
    assert there is not None
    assert (there.step, there.seconds) == (20, pytest.approx(0.2))
    assert arrival(run([0.5, 0.3]), ERROR, 0.29) is None


def test_the_target_itself_counts_in_spite_of_rounding():
    assert arrival(run([0.1 + 0.2]), ERROR, 0.3) is not None


def test_values_that_are_no_numbers_neither_arrive_nor_are_the_best():
    bad = run([None, math.nan, -math.inf, 0.4, None])
    assert best_of(bad, ERROR) == 0.4
    there = arrival(bad, ERROR, 0.4)
    assert there is not None
    assert there.step == 40
    assert best_of(run([None, None]), ERROR) is None


def test_the_target_is_what_the_best_without_kfac_reaches_with_every_seed():
    good, bad = sgd([0.5, 0.2], [0.5, 0.3]), contender("AdamW", run([0.4]), run([0.4]))
    assert natural_target([good, bad, kfac([0.01], [0.01])], ERROR) == Target(
        0.3, "SGD", "with every seed", "the best without K-FAC"
    )


def test_runs_that_were_stopped_early_do_not_set_the_target_where_others_came_to_their_end():
    one = contender("SGD", run([0.5, 0.2]), run([0.9], reason="SIGTERM", seed=2))
    assert natural_target([one], ERROR) == Target(0.2, "SGD", "with 1 of its 2 seeds", PLAIN)
    only_stopped = contender("SGD", run([0.9], reason="SIGTERM"))
    assert natural_target([only_stopped], ERROR) == Target(0.9, "SGD", "so far", PLAIN)


def test_contenders_whose_seeds_all_came_to_their_end_set_the_target_before_luckier_ones():
    lucky = contender("AdamW", run([0.01]), run([], reason="diverged: no"), run([], reason="crashed: no"))
    assert natural_target([lucky, sgd([0.3], [0.3])], ERROR) == Target(
        0.3, "SGD", "with every seed", "the best without K-FAC"
    )
    assert natural_target([lucky], ERROR) == Target(0.01, "AdamW", "with 1 of its 3 seeds", PLAIN)


def test_what_diverged_or_crashed_sets_no_target():
    broken = contender("SGD", run([0.9], reason="diverged: no"), run([0.9], reason="crashed: no"))
    assert natural_target([broken], ERROR) == Target(None)
    assert judge(comparison(broken, kfac([0.1], reason="crashed: no"))).sentence.startswith("No verdict")


def test_without_a_rival_kfac_sets_the_target_itself_and_without_numbers_there_is_none():
    assert natural_target([kfac([0.3, 0.2])], ERROR) == Target(0.2, "K-FAC", "with every seed", "the best there is")
    assert natural_target([sgd([None])], ERROR) == Target(None)
    assert natural_target([], ERROR) == Target(None)


def test_a_row_has_means_and_ranges_over_seeds():
    row = row_of(sgd([0.5, 0.1], [0.1, 0.1], seconds_a_step=0.5), ERROR, 0.1)
    assert row.updates is not None
    assert row.seconds is not None
    assert (row.updates.mean, row.updates.low, row.updates.high) == (15, 10, 20)
    assert (row.seconds.mean, row.seconds.low, row.seconds.high) == (7.5, 5, 10)
    assert row.step_seconds is not None
    assert row.step_seconds.mean == 0.5


def test_a_row_whose_seeds_did_not_all_arrive_has_no_mean_time():
    row = row_of(sgd([0.5, 0.1], [0.5, 0.5]), ERROR, 0.1)
    assert row.updates is row.seconds is None
    assert [one is not None for one in row.arrivals] == [True, False]
    assert row.best is not None
    assert (row.best.low, row.best.high) == (0.1, 0.5)


def test_a_row_says_how_runs_ended_that_did_not_come_to_their_end():
    one = contender("SGD", run([0.5]), run([0.5], reason="SIGTERM"), run([], reason="crashed: OutOfMemoryError: no"))
    assert row_of(one, ERROR, 0.1).note == "1 of 3 SIGTERM, 1 of 3 crashed"


@pytest.mark.parametrize(
    ("ours", "theirs", "who"),
    [
        ([1, 2], [3, 4], "first"),
        ([1, 3], [2, 4], "tie"),
        ([1, 2], [2, 3], "tie"),
        ([1, 1], [1, 1], "tie"),
        ([1, 2], [math.inf, math.inf], "first"),
        ([1, math.inf], [2, math.inf], "tie"),
        ([math.inf], [math.inf], "neither"),
        ([1.0], [], "first"),
        ([], [], "neither"),
        ([100], [104], "tie"),  # one seed: a difference of 5 % is nothing
        ([100], [106], "first"),
        ([100], [106, 200], "first"),
        ([100, 100], [104, 104], "first"),
        ([0], [0], "tie"),
        # Of three and three, one of the 20 orders has all of ours in front: 5 %.
        ([1, 2, 3], [4, 5, 6], "first"),
        ([1, 2, 4], [3, 5, 6], "tie"),
        ([1, 2, 3], [3, 4, 5], "tie"),
        # Of five and five, 4 lost pairs of 25 are within 5 % (12 of 252 orders), and 5 are not (19).
        ([1, 2, 3, 4, 9], [5, 6, 7, 8, 10], "first"),
        ([1, 2, 3, 4, 10], [5, 6, 7, 8, 9], "tie"),
        ([1, 2, 3, 4, math.inf], [5, 6, 7, 8, math.inf], "tie"),
        ([1, 2, 3, 4, 4], [5, 6, 7, math.inf, math.inf], "first"),
        # Three and four: one order of 35, or two, are within 5 %: no more than one lost pair... of 12.
        ([1, 2, 3], [4, 5, 6, 7], "first"),
        ([1, 2, 4], [3, 5, 6, 7], "tie"),
    ],
)
def test_first_is_who_is_in_front_more_often_than_chance_would_put_it_there(ours, theirs, who):
    assert order(ours, theirs) == who
    mirrored = {"first": "second", "second": "first"}
    assert order(theirs, ours) == mirrored.get(who, who)


def test_the_ranks_are_judged_as_scipy_does():
    stats = pytest.importorskip("scipy.stats")
    random = torch.Generator().manual_seed(0)
    for trial in range(200):
        mine, its = (3 + trial % 4, 3 + trial % 3)
        ours = torch.rand(mine, generator=random).tolist()
        theirs = (torch.rand(its, generator=random) + 0.4).tolist()
        p = stats.mannwhitneyu(ours, theirs, alternative="less", method="exact").pvalue
        assert (order(ours, theirs) == "first") == (p <= 0.05 + 1e-12)


def test_first_of_several_is_who_is_first_before_each():
    assert clear_first([[1, 2, 3], [4, 5, 6]]) == 0
    assert clear_first([[1, 2, 3], [4, 5, 6], [7, 8, 9]]) is None  # the best of three is that by chance more often
    assert clear_first([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [6, 7, 8, 9, 10]]) == 0
    assert clear_first([[1, 2, 4], [3, 5, 6], [7, 8, 9]]) is None
    assert clear_first([[1, 2, 3]]) is None
    assert clear_first([[], [1, 2, 3]]) == 1
    assert clear_first([]) is None


def test_the_error_of_test_cases_is_the_measure_and_else_what_all_runs_have():
    assert measure_of([sgd([0.1]), kfac([0.1])]) == ERROR
    with_loss_only = contender("SGD", run([], losses=[1.0]))
    assert measure_of([with_loss_only, kfac([0.1])]) == LOSS
    in_training = dataclasses.replace(run([0.5]), train=run([0.5]).test, test=())
    assert measure_of([contender("mine", in_training), kfac([0.1])]) == Measure(of="train")
    assert measure_of([contender("mine", in_training)]) == Measure(of="train")
    assert measure_of([]) == ERROR


def test_a_run_that_crashed_at_once_does_not_change_the_measure():
    assert measure_of([sgd([0.1]), contender("AdamW", run([], reason="crashed: no"))]) == ERROR
    before_its_test = dataclasses.replace(run([], reason="crashed: no"), train=run([], losses=[1.0]).test)
    assert measure_of([sgd([0.1]), contender("AdamW", before_its_test)]) == ERROR


def test_a_run_that_is_nan_from_the_first_test_on_does_not_change_the_measure():
    trained = dataclasses.replace(run([None]), train=run([], losses=[1.0]).test)
    assert measure_of([sgd([0.1]), contender("AdamW", trained)]) == ERROR


def test_the_row_spoken_of_is_the_fastest_by_the_clock_then_the_one_that_came_closest():
    slow, fast = row_of(sgd([0.1]), ERROR, 0.1), row_of(sgd([0.1], seconds_a_step=0.001), ERROR, 0.1)
    never = row_of(sgd([0.2]), ERROR, 0.1)
    nothing, not_run = row_of(sgd([]), ERROR, 0.1), row_of(sgd(), ERROR, 0.1)
    assert fastest([slow, nothing, never, fast]) is fast
    assert fastest([never, nothing]) is never
    assert fastest([not_run, nothing]) is nothing
    assert fastest([not_run]) is None


def test_targets_are_read_as_people_write_them():
    assert ERROR.read("5%") == ERROR.read(" 5 % ") == ERROR.read("0.05") == 0.05
    assert LOSS.read("1.5") == 1.5
    for text in ("five", "5", "150%", "nan", "-1%"):
        with pytest.raises(ValueError, match="target"):
            ERROR.read(text)
    with pytest.raises(ValueError, match="percent"):
        LOSS.read("5%")


def test_durations_have_three_digits_or_are_read_like_clocks():
    assert [duration(one) for one in (0.01234, 0.9996, 1.5, 99.9, 100, 605, 7500)] == [
        "12.3 ms",
        "1 s",
        "1.5 s",
        "99.9 s",
        "1 min 40 s",
        "10 min 05 s",
        "2 h 05 min",
    ]


# The sentence


def test_kfac_that_is_first_by_the_clock_pays_and_both_clocks_are_said():
    slow = sgd([0.9, 0.9, 0.9, 0.1], [0.9, 0.9, 0.9, 0.1])
    verdict = judge(comparison(slow, kfac([0.1, 0.05, 0.05, 0.05], [0.1, 0.1, 0.1, 0.1], seconds_a_step=0.02)))
    assert verdict.target == 0.1
    assert verdict.sentence == (
        "K-FAC pays here: to 10 % test error, what SGD reaches with every seed, K-FAC takes 10 updates and 200 ms, and "
        "SGD, the fastest without it, 40 updates and 400 ms: 4.0 times fewer updates and 2.0 times less time."
    )


def test_kfac_that_saves_updates_and_costs_time_does_not_pay_by_the_clock_and_hears_what_would_change_that():
    slow = sgd([0.9, 0.1], [0.9, 0.1])
    verdict = judge(comparison(slow, kfac([0.1, 0.1], [0.1, 0.1], seconds_a_step=0.05)))
    assert verdict.sentence.startswith("K-FAC saves updates here, but it does not pay by the clock: ")
    assert "2.0 times fewer updates and 2.5 times as much time." in verdict.sentence
    assert verdict.advice == (
        "By the clock K-FAC would be first if its updates up to there took less than 20 ms each: they take 50 ms, and "
        "SGD's 10 ms.",
    )


def test_kfac_that_needs_more_updates_does_not_pay_and_no_saving_would_help():
    verdict = judge(comparison(sgd([0.1, 0.1], [0.1, 0.1]), kfac([0.9, 0.1], [0.9, 0.1])))
    assert verdict.sentence.startswith("K-FAC does not pay here: ")
    assert "2.0 times as many updates and 2.0 times as much time." in verdict.sentence
    assert verdict.advice[0].startswith("It is not the time of its steps that holds K-FAC back")


def test_kfac_that_never_reaches_the_target_is_told_so_with_its_best():
    verdict = judge(comparison(sgd([0.1], [0.1]), kfac([0.3], [0.25])))
    assert verdict.sentence == (
        "K-FAC does not pay here: SGD reaches 10 % test error after 10 updates and 100 ms; K-FAC never does (its best "
        "is 25 %)."
    )


def test_kfac_that_arrives_with_some_seeds_only_is_told_with_how_many():
    verdict = judge(comparison(sgd([0.1], [0.1], [0.1]), kfac([0.1], [0.1], [0.2])))
    assert "K-FAC does with only 2 of 3 seeds" in verdict.sentence


def test_a_target_that_nobody_else_reaches_pays():
    verdict = judge(comparison(sgd([0.2], [0.2]), kfac([0.1], [0.1]), target=0.1))
    assert verdict.sentence == (
        "K-FAC pays here: K-FAC reaches 10 % test error after 10 updates and 100 ms; SGD never does (its best is 20 %)."
    )


def test_a_target_that_nobody_reaches_gives_no_verdict():
    verdict = judge(comparison(sgd([0.2]), kfac([0.1]), target=0.01))
    assert verdict.sentence.startswith(
        "No verdict: not every seed of anybody reaches 1 % test error; K-FAC never does (its best is 10 %), SGD never"
    )


def test_seeds_that_overlap_are_a_tie_in_words():
    verdict = judge(comparison(sgd([0.9, 0.1], [0.1, 0.1]), kfac([0.1, 0.1], [0.9, 0.1])))
    assert verdict.sentence.startswith("K-FAC and SGD are too close to tell apart: ")
    assert verdict.sentence.endswith(": as many updates and as much time.")


def test_a_tie_by_the_clock_alone_says_that_updates_are_saved():
    late = sgd([0.9, 0.9, 0.1], [0.9, 0.9, 0.1])
    early = contender(
        "K-FAC",
        run([0.9, 0.1], uses_kfac=True, seconds_a_step=0.01),
        run([0.9, 0.1], uses_kfac=True, seconds_a_step=0.02),
        uses_kfac=True,
    )
    verdict = judge(comparison(late, early))
    assert verdict.sentence.startswith("K-FAC saves updates here, but by the clock it is a tie: ")
    assert verdict.sentence.endswith(" (the time is within what chance does with so few seeds).")


def test_one_seed_is_judged_and_said_to_be_one():
    verdict = judge(comparison(sgd([0.9, 0.1]), kfac([0.1, 0.1])))
    assert verdict.sentence.startswith("K-FAC pays here")
    assert verdict.sentence.endswith("(with one seed, nobody knows the spread).")


def test_runs_that_are_all_nan_count_as_never_and_do_not_hide_the_others():
    verdict = judge(comparison(sgd([0.1], [0.1]), contender("AdamW", run([None])), kfac([None], [None])))
    assert verdict.target == 0.1
    assert verdict.measure == ERROR
    assert verdict.sentence.startswith("K-FAC does not pay here: SGD reaches 10 % test error")
    assert verdict.sentence.endswith("K-FAC never does (nothing it gave was a number).")


def test_a_kfac_run_that_stopped_early_after_arriving_still_arrived():
    stopped = kfac([0.1], [0.1], reason="SIGTERM")
    verdict = judge(comparison(sgd([0.9, 0.1], [0.9, 0.1]), stopped))
    assert verdict.sentence.startswith("K-FAC pays here")
    assert verdict.rows[1].note == "2 of 2 SIGTERM"


def test_a_run_that_was_stopped_on_its_way_is_not_one_that_never_arrives():
    ours = contender(
        "K-FAC", run([0.1], uses_kfac=True), run([], reason="SIGINT"), run([0.9], reason="unfinished"), uses_kfac=True
    )
    verdict = judge(comparison(sgd([0.9, 0.9, 0.1], [0.9, 0.9, 0.1]), ours))
    assert verdict.sentence.startswith("K-FAC pays here")
    assert len(verdict.rows[1].arrivals) == 1
    assert verdict.rows[1].note == "1 of 3 SIGINT, 1 of 3 unfinished"
    broken = contender(
        "K-FAC", run([0.1]), run([], reason="crashed: no"), run([], reason="diverged: no"), uses_kfac=True
    )
    assert "with only 1 of 3 seeds" in judge(comparison(sgd([0.1], [0.1], [0.1]), broken)).sentence


def test_a_target_that_some_seeds_set_is_said_to_be_theirs():
    verdict = judge(comparison(contender("SGD", run([0.1]), run([], reason="diverged: no")), kfac([0.1], [0.1])))
    assert "reached with 1 of its 2 seeds" in verdict.target_says
    assert "every seed" not in verdict.target_says


def test_the_best_of_many_variants_must_be_surer_than_the_only_one():
    slow = sgd(*[[0.9, 0.9, 0.1]] * 3)
    variants = [contender(f"K-FAC {number}", *kfac(*[[0.1]] * 3).runs, uses_kfac=True) for number in range(4)]
    assert judge(comparison(slow, variants[0])).sentence.startswith("K-FAC 0 pays here")
    assert "too close to tell apart" in judge(comparison(slow, *variants)).sentence
    enough = [contender(one.name, *kfac(*[[0.1]] * 5).runs, uses_kfac=True) for one in variants]
    assert judge(comparison(sgd(*[[0.9, 0.9, 0.1]] * 5), *enough)).sentence.startswith("K-FAC 0 pays here")


def test_chance_decides_no_more_often_than_it_may_whatever_the_number_of_variants():
    random = torch.Generator().manual_seed(0)
    pays = 0
    for _ in range(400):
        times = torch.rand(5, 5, generator=random).tolist()
        chances = (CHANCE / 4, CHANCE)
        best = min(times[1:], key=sum)
        pays += order(best, times[0], chances=chances) == "first"
    assert pays / 400 <= 0.06


def test_where_nobody_is_clearly_first_nobody_is_said_to_be():
    both = comparison(contender("a", run([0.9, 0.1]), run([0.1])), contender("b", run([0.1]), run([0.9, 0.1])))
    assert judge(both).sentence.endswith("nobody is clearly the first at 10 % test error.")


def test_how_often_was_looked_is_said_with_the_target():
    assert "there was one every 10 updates" in judge(comparison(sgd([0.1]), kfac([0.1]))).target_says


def test_many_seeds_are_judged_in_no_time():
    assert order(list(range(80)), list(range(40, 120))) == "first"
    assert order(list(range(80)), list(range(5, 85))) == "tie"


def test_the_limit_that_is_told_is_below_what_is_and_equal_updates_are_not_called_later():
    # The first updates of K-FAC cost more than the later ones.
    dear = dataclasses.replace(run([0.1, 0.1], uses_kfac=True, seconds_a_step=0.5), steps=1000, seconds=12.0)
    verdict = judge(comparison(sgd([0.9, 0.1], seconds_a_step=0.1), contender("K-FAC", dear, uses_kfac=True)))
    assert "took less than 200 ms each: they take 500 ms" in verdict.advice[0]
    same = judge(comparison(sgd([0.1], [0.1]), kfac([0.1], [0.1], seconds_a_step=0.02)))
    assert not [line for line in same.advice if "later" in line]


def test_the_best_of_several_variants_is_the_one_spoken_of():
    reduced = contender("K-FAC, reduce", *kfac([0.1], [0.1], seconds_a_step=0.001).runs, uses_kfac=True)
    verdict = judge(comparison(sgd([0.9, 0.1], [0.9, 0.1]), kfac([0.1], [0.1]), reduced))
    assert verdict.sentence.startswith("K-FAC, reduce pays here")


def test_without_kfac_or_without_a_rival_there_is_a_ranking_instead():
    assert judge(comparison(sgd([0.1]))).sentence == (
        "No verdict: nobody here has K-FAC; SGD reaches 10 % test error after 10 updates and 100 ms."
    )
    assert "everybody here has K-FAC" in judge(comparison(kfac([0.1]))).sentence
    assert "nobody reached 10 % test error" in judge(comparison(sgd([0.2]), target=0.1)).sentence


def test_nothing_measured_is_no_verdict():
    for contenders in ((), (sgd(),), (sgd([None]), kfac())):
        verdict = judge(comparison(*contenders))
        assert verdict.sentence == "No verdict: no run came to its end with a number."
        assert verdict.target is None


def test_losses_are_judged_where_nothing_is_classified():
    ours = contender("K-FAC", run([], losses=[1.0], uses_kfac=True), uses_kfac=True)
    verdict = judge(comparison(contender("SGD", run([], losses=[2.0, 1.0])), ours))
    assert "to 1 test loss, what SGD reaches with every seed" in verdict.sentence


# Advice


def test_the_largest_part_of_kfacs_step_comes_with_what_makes_it_cheaper():
    def advice(parts, **options):
        ours = kfac([0.1], [0.1], parts=parts, settings={"kfac": options})
        return judge(comparison(sgd([0.9, 0.1], [0.9, 0.1]), ours)).advice

    assert advice({"model": 0.4, "statistics": 0.6}) == (
        "Statistics take 60 % of K-FAC's step: try kfac-reduce, or kfac+kfac.factor_update_steps=20 among the "
        "--optimizers.",
    )
    assert advice({"model": 0.4, "statistics": 0.6}, sharing="reduce", factor_update_steps=5) == (
        "Statistics take 60 % of K-FAC's step: try kfac+kfac.factor_update_steps=10 among the --optimizers.",
    )
    assert advice({"model": 0.4, "solve": 0.5, "statistics": 0.1}, inv_update_epochs=0.5) == (
        "Decompositions take 50 % of K-FAC's step: try kfac-inverse, or kfac+kfac.inv_update_epochs=1 among the "
        "--optimizers.",
    )
    assert advice({"model": 0.4, "precondition": 0.6}, solver="inverse") == (
        "Preconditioning takes 60 % of K-FAC's step: try a larger training.batch, for which it costs no more.",
    )
    assert advice({"model": 0.4, "precondition": 0.6}) == (
        "Preconditioning takes 60 % of K-FAC's step: try kfac-inverse among the --optimizers, or a larger "
        "training.batch, for which it costs no more.",
    )
    assert advice({"model": 0.9, "statistics": 0.1}) == ()
    assert advice({}) == ()


def test_what_has_taken_part_is_not_advised():
    def advice(part, options, *others):
        ours = kfac([0.1], [0.1], parts={"model": 0.4, part: 0.6}, settings={"kfac": options})
        rivals = [
            contender(f"K-FAC {n}", run([0.9], uses_kfac=True, settings={"kfac": other}), uses_kfac=True)
            for n, other in enumerate(others)
        ]
        # What stands in a recipe without K-FAC has not been tried.
        plain = sgd([0.9, 0.1], [0.9, 0.1], settings={"kfac": {"enabled": False, "solver": "inverse"}})
        return judge(comparison(plain, ours, *rivals)).advice

    inverse, later = {"solver": "inverse"}, {"inv_update_steps": 40}
    every = {"inv_update_steps": 20}
    takes = "Decompositions take 60 % of K-FAC's step: try "
    assert advice("solve", every) == (f"{takes}kfac-inverse, or kfac+kfac.inv_update_steps=40 among the --optimizers.",)
    assert advice("solve", every, inverse) == (f"{takes}kfac+kfac.inv_update_steps=40 among the --optimizers.",)
    assert advice("solve", every, later) == (f"{takes}kfac-inverse among the --optimizers.",)
    assert advice("solve", every, later, inverse) == ()
    assert advice("statistics", {}, {"sharing": "reduce"}, {"factor_update_steps": 20}) == ()
    assert advice("precondition", {}, inverse) == (
        "Preconditioning takes 60 % of K-FAC's step: try a larger training.batch, for which it costs no more.",
    )


def test_a_setting_that_won_at_the_edge_of_its_sweep_is_told():
    trials = tuple(Trial(settings={"lr": rate}, rungs=((1, 0.1),)) for rate in (0.01, 0.1, 1.0))
    edge = contender("SGD", run([0.1]), trials=trials, settings={"lr": 1.0})
    inside = contender("AdamW", run([0.1]), trials=trials, settings={"lr": 0.1})
    assert judge(comparison(edge, inside)).advice == (
        "SGD's learning rate of 1 is the largest that was tried: a better one may lie beyond.",
    )


def test_runs_of_ones_own_scripts_are_advised_in_the_words_of_scripts():
    ours = kfac([0.1], [0.1], parts={"model": 0.4, "solve": 0.6})
    assert judge(comparison(sgd([0.9, 0.1], [0.9, 0.1]), ours)).advice == (
        'Decompositions take 60 % of K-FAC\'s step: try solver="inverse", or a larger inv_update_steps.',
    )


def test_where_kfac_never_arrives_a_faster_step_is_not_advised():
    ours = kfac([0.3], [0.3], parts={"model": 0.4, "solve": 0.6})
    advice = judge(comparison(sgd([0.1], [0.1]), ours)).advice
    assert len(advice) == 1
    assert advice[0].startswith("It is not the time of its steps that holds K-FAC back")


def test_a_kfac_that_is_not_behind_is_not_told_what_holds_it_back():
    ours = kfac([0.1], [0.1], [0.3], parts={"model": 0.4, "solve": 0.6})
    advice = judge(comparison(sgd([0.1], [0.1], [0.1]), ours)).advice
    assert not [line for line in advice if "holds K-FAC back" in line]


def test_a_tie_is_advised_to_run_more_seeds():
    advice = judge(comparison(sgd([0.9, 0.1], [0.1, 0.1]), kfac([0.1, 0.1], [0.9, 0.1]))).advice
    assert advice == ("More seeds may tell what 2 could not: --resume --seeds 4.",)


def test_a_clock_that_cannot_be_trusted_is_doubted():
    uneven = contender("SGD", run([0.1], seconds_a_step=0.01), run([0.1], seconds_a_step=0.2))
    advice = judge(comparison(uneven, kfac([0.1], [0.1]))).advice
    assert advice[0].startswith("SGD's step took 10 ms in one run and 200 ms in another: something else was using")


def test_a_rival_that_learned_nothing_is_no_yardstick_and_that_is_said():
    idle = contender("SGD", *(dataclasses.replace(run([0.88]), train=run([0.9]).test) for _ in range(2)))
    assert judge(comparison(idle, kfac([0.1], [0.1]))).advice[0].startswith("SGD hardly learned at all (88 % at best)")


def test_where_only_kfac_gave_numbers_it_is_judged_by_them():
    verdict = judge(comparison(contender("SGD", run([None], reason="diverged: no")), kfac([0.1])))
    assert verdict.sentence.startswith(
        "K-FAC pays here: K-FAC reaches 10 % test error after 10 updates and 100 ms; SGD"
    )
    assert "which K-FAC, the best there is, reached" in verdict.target_says


def test_means_of_few_updates_are_not_rounded_away():
    verdict = judge(comparison(sgd([0.9, 0.1], [0.9, 0.1], every=3), kfac([0.1], [0.9, 0.1], every=3)))
    assert "K-FAC takes 4.5 updates" in verdict.sentence
    one = judge(comparison(sgd([0.9, 0.1], every=1), kfac([0.1], every=1)))
    assert "K-FAC takes 1 update and" in one.sentence
