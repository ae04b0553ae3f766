"""Statistics and decompositions that other processes make, inside K-FAC."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from tests.distribute.mixed import CASES, Mixed, batches, loss_of
from tests.ranks import run_on_ranks
from tests.roles.conftest import Hosts, pause, wait_for
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.curvature import PATIENCE
from natgrad.packets import packed, unpacked
from natgrad.roles import post
from natgrad.roles.deliveries import Deliveries, pack_statistics, unpack_statistics
from natgrad.roles.directory import Directory
from natgrad.roles.helpers import with_inverse_workers
from natgrad.roles.inverse import serve
from natgrad.roles.role import Role
from natgrad.roles.stats import Desk

OPTIONS = {"fisher": "exact", "factor_update_steps": 2, "inv_update_steps": 4, "lr": 0.1}


def counted(model, inputs, **options):
    """A stats worker's KFAC with one batch counted, and nothing committed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a test it may live in a process that trains
        worker = natgrad.KFAC(model, **{**OPTIONS, **options})
    model(inputs)
    worker._window.count()
    worker._window.finish()
    return worker


class Posted:
    """Deliveries by hand: what is in the box has come."""

    def __init__(self, box=()):
        self.box, self.received, self.sent = list(box), 0, []

    def receive(self, window, parameters):
        steps = [unpack_statistics(payload, window, parameters) for payload in self.box]
        self.box = []
        return steps

    def send_if_due(self, step, every):
        self.sent.append(step)


def helped(model, deliveries, **options):
    kfac = natgrad.KFAC(model, **{**OPTIONS, **options})
    kfac._curvature.deliveries = deliveries
    return kfac


def step(model, kfac, inputs, targets):
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model(inputs), targets).backward()
    kfac.step()


def steps(model, kfac, data):
    for inputs, targets in data:
        step(model, kfac, inputs, targets)


def factors_of(kfac):
    return [factor.mean() for block in kfac.blocks for factor in block.factors()]


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_a_delivery_gives_the_factors_that_the_batch_itself_would_give(fisher):
    batch = list(batches(3))
    options = {"factor_decay": 0.7, "fisher": fisher}
    generators = [torch.Generator().manual_seed(5) for _ in range(3)] if fisher == "sampled" else [None] * 3
    model = Mixed()
    own = natgrad.KFAC(model, **{**OPTIONS, **options, "factor_update_steps": 1}, generator=generators[0])
    step(model, own, *batch[0])
    step(model, own, *batch[1])

    posted = Posted()
    kfac = helped(model, posted, **options, generator=generators[1])
    step(model, kfac, *batch[0])  # the first for itself
    generators[2].set_state(generators[1].get_state()) if fisher == "sampled" else None
    worker = counted(Mixed(), batch[1][0], fisher=fisher, generator=generators[2])
    payload = pack_statistics(worker._window, 1)
    step(model, kfac, *batch[2])  # nothing is due
    posted.box = [payload]
    step(model, kfac, *batch[2])
    for mine, known in zip(factors_of(kfac), factors_of(own), strict=True):
        torch.testing.assert_close(mine, known, rtol=1e-12, atol=1e-14)
    assert kfac._metrics.delivery_age == 1
    for mine, known in zip(kfac.blocks, own.blocks, strict=True):
        torch.testing.assert_close(mine.straight.counts, known.straight.counts)


def test_ranks_that_are_helped_watch_nothing_after_the_first_step():
    model, posted = Mixed(), Posted()
    kfac = helped(model, posted)
    for number, (inputs, targets) in enumerate(batches(6)):
        posted.box = [pack_statistics(counted(Mixed(), inputs)._window, number)]
        step(model, kfac, inputs, targets)
        assert not kfac._watch.armed
    assert kfac.metrics()["factor_age"] <= 1
    assert posted.sent == [1, 2, 3, 4, 5, 6]


def test_who_waits_in_vain_takes_statistics_until_others_come_again():
    model, posted = Mixed(), Posted()
    kfac = helped(model, posted)
    data = list(batches(60))
    with pytest.warns(natgrad.NatgradWarning, match="no statistics have come from stats workers since step 0"):
        steps(model, kfac, data[: 2 * PATIENCE + 3])
    assert kfac.metrics()["factor_age"] <= 2
    steps(model, kfac, data[:6])
    assert kfac.metrics()["factor_age"] <= 2  # as without helpers
    posted.box = [pack_statistics(counted(Mixed(), data[0][0])._window, 20)]
    steps(model, kfac, data[:3])
    assert not kfac._watch.armed  # left to the helper again
    with pytest.warns(natgrad.NatgradWarning, match="no statistics have come"):
        steps(model, kfac, data[: 2 * PATIENCE + 2])


def test_a_delivery_that_is_not_finite_is_refused_like_a_batch_of_ones_own():
    model, posted = Mixed(), Posted()
    kfac = helped(model, posted)
    data = list(batches(4))
    step(model, kfac, *data[0])
    before = factors_of(kfac)
    broken = Mixed()
    with torch.no_grad():
        broken.query.weight.fill_(torch.nan)
    posted.box = [pack_statistics(counted(broken, data[1][0])._window, 0)]
    step(model, kfac, *data[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, kfac, *data[2])
    assert kfac.metrics()["rejected_statistics"] > 0
    assert all(torch.isfinite(mean).all() for mean in (*before, *factors_of(kfac)))


def test_blocks_that_a_stats_worker_has_seen_first_come_along():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.extra = nn.Linear(4, 2)
            self.double()

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            return self.second(hidden) + (self.extra(hidden) if len(x) == 5 else 0)

    model, posted = Sometimes(), Posted()
    kfac = helped(model, posted)
    torch.manual_seed(1)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))

    def train(cases):
        model.zero_grad()
        functional.cross_entropy(model(x[:cases]), y[:cases]).backward()
        kfac.step()

    train(6)
    assert {block.key for block in kfac.blocks} == {"first.weight", "second.weight"}
    posted.box = [pack_statistics(counted(Sometimes(), x[:5])._window, 0)]
    train(6)
    train(6)
    assert {block.key for block in kfac.blocks} == {"first.weight", "second.weight", "extra.weight"}
    train(5)


def on_rank(rank, ranks):
    """The first rank alone has a stats worker."""
    torch.set_num_threads(1)
    model = Mixed()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    posted = Posted()
    kfac = helped(wrapped, posted)
    for number, (inputs, targets) in enumerate(batches(9)):
        if rank == 0 and number % 4 == 2:
            posted.box = [pack_statistics(counted(Mixed(), inputs)._window, number)]
        own = slice(rank * CASES // ranks, (rank + 1) * CASES // ranks)
        step(wrapped, kfac, inputs[own], targets[own])
    sums = {f"{b.key}/{n}": f.mean().tolist() for b in kfac.gather_blocks() for n, f in enumerate(b.factors())}
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return sums, gradients.tolist(), kfac.metrics()["factor_age"]


def test_on_two_ranks_a_delivery_to_one_is_everybodys(tmp_path):
    first, second = run_on_ranks(on_rank, tmp_path, 2)
    assert first == second
    assert first[2] == 2  # the delivery of step 6 was the last


def role(**numbers):
    return Role(name="gradient", index=0, directory=Directory(None), **numbers)


def test_what_does_not_go_with_helpers_is_told():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="natgrad.roles.take"):
        natgrad.KFAC(model, roles="stats")
    with pytest.raises(ValueError, match="'sampled' or 'exact'"):
        natgrad.KFAC(model, roles=role(stats=1))
    with pytest.raises(RuntimeError, match="for stats workers"):
        natgrad.KFAC(model, roles=role()).help([])
    with pytest.raises(ValueError, match="leave overlap= out"):
        with_inverse_workers("staggered", object())
    assert with_inverse_workers(natgrad.Background(delay=3), executor := FakeExecutor()).where is executor


class FakeExecutor:
    def submit(self, function, *arguments):
        raise NotImplementedError


# Parameters on their way


class Noted:
    """A line that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, step, payload):
        self.sent.append((step, unpacked(payload)))


def sending(model):
    told = []
    deliveries = Deliveries(role(stats=0), model, on_change=told.append)
    deliveries.lines = [Noted()]
    return deliveries, deliveries.lines[0], told


def test_parameters_do_not_queue_up_where_sending_takes_longer_than_steps(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr("natgrad.roles.deliveries.packed", lambda state: packed(state) if gate.wait(10) else b"")
    deliveries, line, _ = sending(nn.Linear(2, 2))
    for number in range(1, 20):
        deliveries.send_if_due(number, 1)
    assert len(deliveries._sender._work.queue) <= 1  # each holds a copy of the model
    gate.set()
    wait_for(deliveries._sending.done)
    deliveries.send_if_due(20, 1)
    wait_for(deliveries._sending.done)
    assert [number for number, _ in line.sent] == [1, 20]


class Extra(nn.Linear):
    extra: object = {"scale": 3.0}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_states_with_more_than_tensors_are_sent():
    deliveries, line, _ = sending(Extra(2, 2))
    deliveries.send_if_due(1, 1)
    wait_for(lambda: line.sent)
    assert line.sent[0][1]["_extra_state"] == {"scale": 3.0}


def test_states_that_cannot_be_sent_are_told_of_once():
    model = Extra(2, 2)
    deliveries, line, told = sending(model)
    model.extra = lambda: None  # no bytes for it
    for number in range(1, 5):
        deliveries.send_if_due(number, 1)
        wait_for(deliveries._sending.done)
    assert line.sent == []
    assert len(told) == 1
    assert "parameters cannot be sent to stats workers" in told[0]


# The end


def callers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("natgrad") and "worker" in thread.name]


def test_a_kfac_that_nobody_holds_hangs_up(hosts: Hosts):
    model = nn.Linear(2, 2)
    desk = Desk(hosts.role("stats"))
    for _ in range(2):  # the second is not disturbed by the first
        kfac = natgrad.KFAC(model, fisher="sampled", lr=0.1, roles=hosts.role())
        wait_for(lambda found=kfac._helpers: found.counters()["stats_workers"] == 1)
        assert len(callers()) == 2
        del kfac
        wait_for(lambda: not callers())
    desk.close()


def test_a_kfac_that_cannot_be_made_leaves_no_calls_behind(hosts: Hosts):
    with pytest.raises(ValueError, match="max_overhead goes with"):
        natgrad.KFAC(nn.Linear(2, 2), fisher="sampled", max_overhead=0.1, roles=hosts.role())
    wait_for(lambda: not callers())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_end_of_a_fork_leaves_calls_alone(hosts: Hosts):
    desk = Desk(hosts.role("stats"))
    kfac = natgrad.KFAC(nn.Linear(2, 2), fisher="sampled", lr=0.1, roles=hosts.role())
    line = kfac._helpers.deliveries.lines[0]
    wire = wait_for(lambda: line._wire)
    child = os.fork()
    if child == 0:
        post._end()
        os._exit(0)
    os.waitpid(child, 0)
    line.send(3, b"parameters")
    assert desk.latest() == (3, b"parameters")
    assert line._wire is wire
    del kfac
    desk.close()


def test_an_inverse_worker_that_hangs_is_lost_after_the_timeout_of_overlap(hosts: Hosts):
    worker = hosts.start(lambda: serve(hosts.role("inverse", stats=0)))
    options = {"delay": 1, "inv_update_steps": 1, "factor_update_steps": 1, "lr": 0.1}
    model, data = Mixed(), list(batches(4))
    kfac = natgrad.KFAC(model, overlap=natgrad.Background(timeout=0.3), **options, roles=hosts.role(stats=0))
    helpers = kfac._helpers
    wait_for(lambda: helpers.inverse.alive == 1)
    steps(model, kfac, data[:2])
    pause(worker.pid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps(model, kfac, data[2:])
    wait_for(lambda: helpers.inverse.alive == 0)


ASKING = """
import sys, time
sys.path.insert(0, {source!r})
from natgrad.roles import Directory, InverseWorkers, Line, Role, inverse, stats
stats.AGAIN = inverse.AGAIN = 0.0  # all the time
role = Role(name="gradient", index=0, stats=1, inverse=1, directory=Directory(("127.0.0.1", {port})))
kept = Line(role, 0), InverseWorkers(role)
time.sleep(0.2)
"""


def test_a_process_that_looks_for_helpers_ends_as_it_should(hosts: Hosts):
    """Three, since it takes bad luck to be in the middle of a question."""
    text = ASKING.format(source=str(Path(natgrad.__file__).parents[1]), port=hosts.port)
    running = [subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        _, complaints = process.communicate(timeout=60)
        assert (process.returncode, complaints) == (0, "")
