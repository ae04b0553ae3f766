"""What the machine's processor is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FILE = Path("/proc/cpuinfo")  # Linux


@cache
def entry(name: str) -> str | None:
    """What the system says of a core under a name: "model name", "vendor_id"; None where it says nothing of any."""
    try:
        lines = _FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name and value.strip()), None)
