"""Backward passes in the thread that asks for them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import natgrad
from natgrad.capture.calling_thread import CallingThread

GPU = torch.device("cuda", 0)


def in_own_threads() -> bool:
    return torch._C._is_multithreading_enabled()


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Iterator[None]:
    assert in_own_threads()
    yield
    was = in_own_threads()
    torch._C._set_multithreading_enabled(True)
    assert was


def network(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, natgrad.KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, natgrad.KFAC(model, optimizer=optimizer, factor_update_steps=2, accumulated_loss="sum")


def backward(model: nn.Module) -> None:
    nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 0, 1, 1])).backward()


def test_a_claim_holds_until_it_is_released() -> None:
    thread = CallingThread()
    thread.claim()
    thread.claim()
    assert not in_own_threads()
    thread.release()
    assert in_own_threads()
    thread.release()
    assert in_own_threads()


def test_the_users_own_choice_is_kept() -> None:
    thread = CallingThread()
    with torch.autograd.set_multithreading_enabled(False):
        thread.claim()
        thread.release()
        assert not in_own_threads()


def test_a_choice_that_comes_after_a_claim_is_kept() -> None:
    thread = CallingThread()
    thread.claim()
    thread.release()
    with torch.autograd.set_multithreading_enabled(False):
        thread.release()
        assert not in_own_threads()


def test_two_claims_end_with_the_one_that_was_first() -> None:
    one, other = CallingThread(), CallingThread()
    one.claim()
    other.claim()
    other.release()
    assert not in_own_threads()
    one.release()
    assert in_own_threads()


def test_a_claim_belongs_to_its_thread() -> None:
    thread, elsewhere = CallingThread(), []
    thread.claim()

    def look() -> None:
        elsewhere.append(in_own_threads())
        thread.release()
        elsewhere.append(in_own_threads())

    other = threading.Thread(target=look)
    other.start()
    other.join()
    assert elsewhere == [True, True]
    assert not in_own_threads()
    thread.release()


@pytest.mark.parametrize(
    ("devices", "stays"),
    [({GPU}, True), ({torch.device("cpu")}, False), ({GPU, torch.device("cuda", 1)}, False), (set(), False)],
    ids=["one GPU", "CPU", "two GPUs", "nothing"],
)
def test_one_gpu_alone_is_worked_for_by_one_thread(devices: set[torch.device], stays: bool) -> None:
    _, _, kfac = network()
    kfac._watch.expect_backward(devices)
    assert in_own_threads() is not stays
    kfac.detach()


def test_the_step_that_takes_the_statistics_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, kfac = network()
    claim = kfac._watch.expect_backward
    # As on a GPU, which this machine may not have.
    monkeypatch.setattr(kfac._observer, "_expect_backward", lambda devices: claim({GPU}))
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        found.append(in_own_threads())
        kfac.step()
        assert in_own_threads()
        optimizer.step()
    assert found == [False, True, False, True]


def test_passes_of_several_batches_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, kfac = network()
    claim = kfac._watch.expect_backward
    monkeypatch.setattr(kfac._observer, "_expect_backward", lambda devices: claim({GPU}))
    backward(model)
    backward(model)
    assert not in_own_threads()
    kfac.detach()
    assert in_own_threads()


def test_a_kfac_that_is_gone_takes_its_claim_along() -> None:
    model, _, kfac = network()
    kfac._watch.expect_backward({GPU})
    del kfac
    gc.collect()
    assert in_own_threads()
    backward(model)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_hooks_run_in_the_calling_thread_where_statistics_are_taken() -> None:
    model, optimizer, kfac = network("cuda")
    here, x, y = threading.get_ident(), torch.randn(5, 4, device="cuda"), torch.tensor([0, 1, 0, 1, 1], device="cuda")
    threads: list[int] = []
    for _ in range(4):
        optimizer.zero_grad()
        out = model(x)
        out.register_hook(lambda gradient: threads.append(threading.get_ident()))
        nn.functional.cross_entropy(out, y).backward()
        kfac.step()
        optimizer.step()
    assert [thread == here for thread in threads] == [True, False, True, False]
