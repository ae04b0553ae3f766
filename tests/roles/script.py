"""What torchrun starts in tests: says who it is, and helps or trains until a file tells it to end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import natgrad
from natgrad.overlap.tasks import Task, pack, solve_packed

SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def main(folder: Path, stats: int, inverse: int) -> None:
    role = natgrad.roles.take(stats=stats, inverse=inverse)
    dist.init_process_group("gloo")  # of the gradient ranks; a stats worker is alone in its own
    total = torch.ones(1)
    dist.all_reduce(total)
    facts = {"process": os.getpid(), "parent": os.getppid(), "incarnation": role.incarnation, "total": total.item()}
    facts |= {name: os.environ.get(name) for name in SHOWN}
    told(folder / f"{role.name} {role.index} {role.incarnation}", json.dumps(facts))
    if role.trains:
        train(folder, role)
    else:
        help_with(role)
    dist.destroy_process_group()


def train(folder: Path, role: natgrad.roles.Role) -> None:
    workers = natgrad.roles.InverseWorkers(role)
    lines = [natgrad.roles.Line(role, index) for index in role.helpers]
    root = torch.eye(8).unsqueeze(0)
    payload = pack(Task("eigen", ("a",), (root,)))
    step = 0
    while not (folder / "end").exists():
        step += 1
        try:
            solved = workers.submit(solve_packed, payload).result(20) == solve_packed(payload)
        except ConnectionError:
            solved = False
        for line in lines:
            line.send(step, b"parameters")
        deliveries = [str(line.receive()) for line in lines]
        told(folder / f"progress {role.index}", f"{step} {solved} {deliveries}")
        time.sleep(0.02)
        dist.barrier()
        if (folder / "fail").exists():
            raise SystemExit(5)
    # One may have seen the end before the other: it has not come to the barrier of the next step.
    os._exit(0) if role.index else role.close()


def help_with(role: natgrad.roles.Role) -> None:
    desk = natgrad.roles.Desk(role)
    while not desk.over:
        latest = desk.latest(1)
        if latest is not None:
            desk.deliver(b"from %d" % role.incarnation)


def told(path: Path, text: str) -> None:
    """Written at once, since others read it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
