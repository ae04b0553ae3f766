"""``natgrad inspect``: what it prints, with data and without."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from natgrad.cli.app import app
from natgrad.cli.inspect import _costs


def says(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "110"})
    assert result.exit_code == code, result.output
    return result.output


def test_coverage_memory_and_costs_of_a_recipe():
    text = says("digits", "kfac.inv_update_steps=7")
    assert re.search(r"2\.weight +convolution +A 289² · G 64²", text)
    assert "6 of 6 parameters (100.0% of all weights) have a block" in text
    assert re.search(r"K-FAC's factors and decompositions +8\.7 MiB", text)
    assert re.search(r"statistics +[\d.]+ m?s +10 steps", text)
    assert re.search(r"solve +[\d.]+ m?s +7 steps", text)
    assert re.search(r"[\d.]+ times a step without K-FAC", text)
    assert "made-up" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("cifar10-convnet", "data.path=nowhere", "training.batch=8"),
        ("text-gpt", "data.path=nowhere", "training.batch=2", "data.context=8", "model.layers=1", "model.width=12"),
    ],
)
def test_missing_data_is_made_up_and_said_so(arguments):
    text = says(*arguments)
    assert "with made-up data: " in text
    assert "times a step without K-FAC" in text


def test_without_kfac_there_is_nothing_to_see():
    assert "there is nothing to inspect" in says("digits", "kfac.enabled=false", code=2)


def test_costs_are_those_of_the_steps_that_do_the_work():
    ordinary = {"data": 1.0, "model": 10.0, "precondition": 2.0, "statistics": 0.0, "solve": 0.1}
    steps = [dict(ordinary) for _ in range(12)]
    for number in (3, 6, 9, 12):
        steps[number - 1]["statistics"] = 30.0
    for number in (6, 12):
        steps[number - 1]["solve"] = 100.0
    assert _costs(steps) == {"data": 1, "model": 10, "statistics": 30, "solve": 100, "precondition": 2}
