"""Decompositions beside training on a GPU."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import natgrad
from natgrad.overlap import places
from natgrad.overlap.piles import Piles

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STEPS = 24


def trained(steps=STEPS, *, dtype=torch.float32, watch=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 40), nn.Tanh(), nn.Linear(40, 10)
    )
    model = model.to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = natgrad.KFAC(model, factor_update_steps=2, inv_update_steps=6, **options).attach(optimizer)
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(16, 3, 8, 8, generator=generator, dtype=dtype).cuda(),
            torch.randint(10, (16,), generator=generator).cuda(),
        )
        for _ in range(steps)
    ]
    torch.cuda.synchronize()
    for number, (inputs, targets) in enumerate(data):
        with torch.cuda.device("cuda"), watch(number) if watch is not None else nullcontext():
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), kfac


class NoWaiting:
    """A host that waits for the device is an error."""

    def __enter__(self):
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error):
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_runs_with_a_delay_repeat_bit_for_bit(where, solver):
    background = natgrad.Background(where, delay=4)
    first, kfac = trained(solver=solver, overlap=background)
    second, _ = trained(solver=solver, overlap=background)
    assert torch.equal(first, second)
    assert kfac.metrics()["background_failures"] == 0


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_stream_beside_training_gives_what_the_step_gives(solver):
    beside, _ = trained(solver=solver, overlap=natgrad.Background("gpu", delay=4))
    inside, _ = trained(solver=solver, delay=4)
    assert torch.equal(beside, inside)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_cores_give_what_the_gpu_gives(solver):
    options = {"dtype": torch.float64, "solver": solver}
    beside, _ = trained(overlap=natgrad.Background("cpu", delay=4), **options)
    inside, _ = trained(delay=4, **options)
    torch.testing.assert_close(beside, inside, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("costs", [None, "measured"])
def test_costs_choose_where(costs):
    options = {"delay": 4, "strategy": natgrad.Strategy(costs=costs)}
    beside, kfac = trained(overlap="background", **options)
    assert kfac._curvature.jobs.where in ("cpu", "gpu")
    assert kfac.metrics()["background_failures"] == 0
    again, _ = trained(overlap=natgrad.Background(kfac._curvature.jobs.where), **options)
    assert torch.equal(beside, again)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_steps_in_between_do_not_wait_for_the_device(where):
    release = threading.Event()
    owner, name = (Piles, "solve") if where == "cpu" else (places, "solve_tensors")
    own = getattr(owner, name)

    def slow(*arguments):
        if threading.current_thread() is not threading.main_thread():
            release.wait(60)
        return own(*arguments)

    def watch(number):
        # Statistics come in even steps and a request in step 6; in step 9 its result is still on its way.
        return NoWaiting() if number in (7, 9) else nullcontext()

    setattr(owner, name, slow)
    try:
        timer = threading.Timer(2.0, release.set)
        timer.start()
        _, kfac = trained(12, overlap=natgrad.Background(where), watch=watch)
        assert kfac.metrics()["background_failures"] == 0
        timer.cancel()
    finally:
        release.set()
        setattr(owner, name, own)


def test_a_process_pool_and_garbage_on_a_gpu():
    class Wrong(places.ThreadPoolExecutor):
        def submit(self, fn, /, *arguments, **keywords):
            return super().submit(lambda: None)

    with Wrong(1) as executor, pytest.warns(natgrad.NatgradWarning, match="did not come"):
        beside, kfac = trained(dtype=torch.float64, overlap=executor, delay=4)
    inside, _ = trained(dtype=torch.float64, delay=4)
    torch.testing.assert_close(beside, inside, rtol=1e-6, atol=1e-8)
    assert kfac.metrics()["background_failures"] > 0


def test_memory_does_not_grow():
    seen = []
    for _ in range(4):
        _, kfac = trained(overlap=natgrad.Background("cpu", delay=4))
        kfac.detach()
        del kfac
        gc.collect()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] <= seen[1]


def test_staggered_on_a_gpu():
    _, even = trained(overlap="staggered")
    _, drift = trained(overlap="staggered", max_overhead=0.5)
    assert even.metrics()["decomposition_age"] <= 12
    assert drift.metrics()["decompositions"] >= 6
