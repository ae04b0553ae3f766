"""Which part a process takes in a run: the first ranks train, then come stats workers, then inverse workers."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from natgrad.roles.directory import Directory
from natgrad.roles.inverse import serve
from natgrad.roles.supervise import supervised

_FIRST_WAIT, _NEXT_WAIT = 300.0, 10.0  # seconds for the store to be there: rank 0 may still be starting


@dataclass(frozen=True, kw_only=True)
class Role:
    """The part of this process: `name` is gradient, stats or inverse, and `index` counts those of that name, of which
    there are `gradients`, `stats` and `inverse`. `rank` and `world` are as torchrun has given them; `incarnation` is
    how often a helper has been started again.
    """

    name: str
    index: int
    gradients: int = 1
    stats: int = 0
    inverse: int = 0
    directory: Directory
    incarnation: int = 0
    rank: int = 0
    world: int = 1

    @property
    def trains(self) -> bool:
        """Whether this process belongs to those that average gradients and update the model."""
        return self.name == "gradient"

    @property
    def helpers(self) -> Sequence[int]:
        """The stats workers that belong to this gradient rank: they are dealt out in turn."""
        return range(self.index, self.stats, self.gradients) if self.trains else range(0)

    def close(self) -> None:
        """Tells the helpers that training is over, if this is the first gradient rank. The end of its script does so
        too.
        """
        if self.trains and self.index == 0 and self.stats + self.inverse:
            self.directory.finish()


# A process takes one role: the environment of a second one would be that of the first.
_taken: list[Role] = []


def take(*, stats: int = 0, inverse: int = 0, inverse_threads: int | None = None) -> Role:
    """Takes the role of this process. Call it first in a script that torchrun starts, before `init_process_group` and
    before anything touches a GPU::

        role = natgrad.roles.take(stats=1, inverse=1)

    Of all processes the last `inverse` decompose factors, with `inverse_threads` threads each (as torch has it, if
    None; torchrun makes that 1 unless OMP_NUM_THREADS is set); this never returns in them. In the `stats` before them
    it returns in a child process, which is started again where it dies. The rest train: they see a WORLD_SIZE without
    the helpers, so that `init_process_group()` joins them alone. With no helpers, nothing is changed.
    """
    for name, number in (("stats", stats), ("inverse", inverse)):
        _check_whole(name, number, at_least=0)
    if inverse_threads is not None:
        _check_whole("inverse_threads", inverse_threads, at_least=1)
    if _taken:
        raise RuntimeError(f"this process is {_described(_taken[0])} already: call natgrad.roles.take() once")
    if stats + inverse == 0:
        role = _without_helpers()
        _taken.append(role)
        return role
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError("call natgrad.roles.take() before init_process_group(): helpers do not join the group")
    rank, world, local_rank, local_world = _numbers(stats, inverse)
    gradients = world - stats - inverse
    if gradients < 1:
        raise ValueError(
            f"torchrun --nproc-per-node {local_world} gives {world} processes: with stats={stats} and "
            f"inverse={inverse} none is left to train. Start at least {stats + inverse + 1}, or take fewer helpers"
        )
    name, index = "gradient", rank
    if rank >= gradients + stats:
        name, index = "inverse", rank - gradients - stats
    elif rank >= gradients:
        name, index = "stats", rank - gradients
    incarnation = 0 if name == "gradient" else supervised(f"{name} worker {index}", over=_over)
    role = Role(
        name=name,
        index=index,
        gradients=gradients,
        stats=stats,
        inverse=inverse,
        directory=Directory.of_environment(),
        incarnation=incarnation,
        rank=rank,
        world=world,
    )
    _taken.append(role)
    if role.trains:
        _train(role, local=max(1, min(local_world, gradients - (rank - local_rank))))
        return role
    _join(role)
    if name == "inverse":
        _invert(role, inverse_threads)
    return role


def _train(role: Role, local: int) -> None:
    os.environ["WORLD_SIZE"] = str(role.gradients)
    if "LOCAL_WORLD_SIZE" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
    if role.index == 0:
        if not role.directory.alone:  # elsewhere attempts have keys of their own
            role.directory.begin()
        process = os.getpid()
        atexit.register(lambda: role.close() if os.getpid() == process else None)


def _join(role: Role) -> None:
    """Waits for the store, and makes the environment that of a process alone, which may even have a group of one."""
    if not role.directory.wait(_NEXT_WAIT if role.incarnation else _FIRST_WAIT):
        if role.incarnation:
            sys.exit(0)  # there was one: training is over
        address = ":".join(map(str, role.directory.address or ()))
        raise RuntimeError(f"{_described(role)}: nobody is at {address} (MASTER_ADDR:MASTER_PORT)")
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _invert(role: Role, threads: int | None) -> None:
    if serve(role, threads=threads):
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a decomposition is still under way, which nobody wants any more


def _over() -> bool:
    """Whether training is over, as the supervisor asks: on a connection that no child gets to see."""
    directory = Directory.of_environment()
    try:
        return directory.finished
    finally:
        directory.close()


def _without_helpers() -> Role:
    rank, world = (int(os.environ.get(*one)) for one in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return Role(name="gradient", index=rank, gradients=world, directory=Directory(None), rank=rank, world=world)


def _numbers(stats: int, inverse: int) -> tuple[int, int, int, int]:
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    missing = [name for name in (*names, "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"natgrad.roles.take(stats={stats}, inverse={inverse}) divides the processes that torchrun has started, "
            f"and this one is not under torchrun ({', '.join(missing)} not set): start it by "
            f"torchrun --nproc-per-node {stats + inverse + 1} script.py"
        )
    try:
        rank, world, _ = (int(os.environ[name]) for name in names)
        # Where they are set by hand, those of a machine may be missing.
        return rank, world, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    except ValueError as error:
        raise RuntimeError(f"torchrun's environment variables are not numbers: {error}") from None


def _check_whole(name: str, number: object, *, at_least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < at_least:
        raise ValueError(f"{name} must be a whole number, {at_least} or more, not {number!r}")


def _described(role: Role) -> str:
    return f"{role.name} {'rank' if role.trains else 'worker'} {role.index}"
