"""What a run ran on: enough to tell, months later, why another machine gives other numbers or other times."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from natgrad import processor
from natgrad.cores import available_cores

from .files import write_text_atomically

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
_PREFIXES = ("TORCH_", "PYTORCH_", "NCCL_")


def describe(device: torch.device | str, ranks: int) -> dict[str, Any]:
    """Versions, machine, settings and code of this process, as JSON has them; what cannot be found out is None."""
    import natgrad  # here, since natgrad may be importing this

    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "git_commit": git_commit(Path.cwd()),
        "natgrad": natgrad.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "device": _device(torch.device(device)),
        "cpu": {"name": _cpu_name(), "usable_cores": available_cores(), "memory": _memory()},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }


def record(path: Path, facts: Mapping[str, Any]) -> None:
    """Adds an entry to environment.json, one for each start or resume of the run.

    A file that cannot be understood is set aside as environment.json.damaged; it is not worth a training.
    """
    earlier = _runs(path)
    if earlier is None:
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    text = json.dumps({"runs": [*(earlier or []), dict(facts)]}, indent=2, ensure_ascii=False)
    write_text_atomically(path, text + "\n")


def recorded(path: Path) -> list[dict[str, Any]]:
    """The entries of environment.json, the oldest first; none where it is missing or damaged."""
    return _runs(path) or []


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is different, of the things that may keep a resumed run from repeating the uninterrupted one bit for bit."""
    names = {
        "natgrad": "natgrad",
        "torch": "torch",
        "cuda": "CUDA",
        "cudnn": "cuDNN",
        "ranks": "the number of ranks",
        "threads": "the number of threads",
    }
    pairs = [(text, before.get(key), now.get(key)) for key, text in names.items()]
    pairs.append(("the device", _name(before.get("device")), _name(now.get("device"))))
    return [f"{text} was {_said(old)}, now {_said(new)}" for text, old, new in pairs if old != new]


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out there, with "-dirty" after it where files have changed; None where there is none,
    no git, or git takes its time.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # it must not get in anybody's way
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None


def _runs(path: Path) -> list[dict[str, Any]] | None:
    """The entries; [] where there is no file, None where it is damaged."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return runs if isinstance(runs, list) and all(isinstance(one, dict) for one in runs) else None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": properties.name, "memory": properties.total_memory}
    name = _cpu_name() if device.type == "cpu" else device.type
    return {"type": device.type, "name": name, "memory": _memory()}


def _cpu_name() -> str | None:
    return processor.entry("model name") or platform.processor() or platform.machine() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _name(device: Any) -> Any:
    return device.get("name") if isinstance(device, dict) else device


def _said(value: Any) -> str:
    return "none" if value is None else str(value)
