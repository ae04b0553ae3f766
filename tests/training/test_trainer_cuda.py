"""The trainer on a GPU: no waiting for the device on ordinary steps, and runs that repeat bit for bit."""

from __future__ import annotations

import pytest
import torch

from natgrad import data, recipes
from natgrad.training.events import Listener
from natgrad.training.ranks import Ranks
from natgrad.training.run import arithmetic
from natgrad.training.stop import Stop
from natgrad.training.trainer import Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


def trainer(name: str, *overrides: str, classes: int = 10, listener=None) -> Trainer:
    recipe = recipes.load(name, overrides)
    device = torch.device("cuda", 0)
    cases = data.synthetic(recipe.data, seed=0, place=data.Place(device=device), classes=classes)
    return Trainer(recipe, cases, ranks=Ranks(device=device), listener=listener or Listener())


SMALL = {
    "cifar10-convnet": ("training.batch=64",),
    "cifar10-resnet32": ("training.batch=32", "kfac.factor_update_steps=10", "kfac.inv_update_steps=100"),
    "text-gpt": ("training.batch=8", "model.layers=2", "data.context=32", "model.context=32"),
}


@pytest.mark.parametrize("name", SMALL)
def test_ordinary_steps_do_not_wait_for_the_device(name):
    running = trainer(name, *SMALL[name], "training.log_every=4")
    stop = Stop(running.ranks)
    running.total_steps = 2
    running.evaluate = lambda stop: True
    running.train(stop)
    torch.cuda.synchronize()
    batches = iter(running._batches())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            running.one_step(*next(batches))
            running._tell(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", SMALL)
def test_a_resumed_run_repeats_bit_for_bit(name):
    overrides = (*SMALL[name], "training.deterministic=true", "kfac.fisher=sampled", "training.epochs=9")
    with arithmetic(recipes.load(name, overrides)):
        whole, first, second = (trainer(name, *overrides) for _ in range(3))
        for one in (whole, first, second):
            one.evaluate = lambda stop: True
        whole.total_steps = 14
        whole.train(Stop(whole.ranks))
        first.total_steps = 6
        first.train(Stop(first.ranks))
        second.load_state_dict(first.state_dict())
        second.total_steps = 14
        second.train(Stop(second.ranks))
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parts_add_up_to_the_time_of_steps():
    class Keep(Listener):
        def __init__(self):
            self.events = []

        def progress(self, event):
            self.events.append(event)

    kept = Keep()
    running = trainer("cifar10-convnet", "training.batch=64", "training.log_every=10", listener=kept)
    running.evaluate = lambda stop: True
    running.total_steps = 40
    running.train(Stop(running.ranks))
    assert [event.step for event in kept.events] == [10, 20, 30, 40]
    for event in kept.events[1:]:
        assert event.step_seconds == pytest.approx(sum(event.parts.values()))
        assert set(event.parts) == {"data", "model", "statistics", "solve", "precondition"}
    assert sum(event.parts["statistics"] for event in kept.events) > 0
