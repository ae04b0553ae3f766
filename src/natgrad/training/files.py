"""Files that are either whole or not there: nothing that a kill or a full disk leaves can be mistaken for one.

A file is written under a name that begins with `UNFINISHED` and gets its own name when every byte is on disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".writing-"
"""How the names of unfinished files begin; `remove_leftovers` knows by it what a killed process has left."""


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Puts what `write` writes at `path`, all of it or nothing: whatever is raised, what was there before stays.

    The permissions are those of the file that is replaced, or what the umask says.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # there is none yet, or it is somebody else's
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    finally:  # also after KeyboardInterrupt; nothing is left of it where all went well
        with contextlib.suppress(OSError):
            temporary.unlink()
    _sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """`write_atomically` for text, as UTF-8."""
    data = text.encode()

    def write(file: BinaryIO) -> None:
        file.write(data)

    write_atomically(path, write)


def link_atomically(source: Path, path: Path) -> None:
    """Makes `path` the same file as `source`, or a copy of it where the file system has no hard links."""
    temporary = _temporary(path)
    try:
        os.link(source, temporary)
        os.replace(temporary, path)
    except OSError:
        _copy_atomically(source, path)
    finally:  # also needed where all went well: replacing a file by itself leaves both names
        with contextlib.suppress(OSError):
            temporary.unlink()
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Deletes what processes that were killed have left unfinished. Only for the one process that writes there."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{UNFINISHED}{secrets.token_hex(4)}-{path.name}")


def _copy_atomically(source: Path, path: Path) -> None:
    def write(file: BinaryIO) -> None:
        with open(source, "rb") as original:
            shutil.copyfileobj(original, file, 1 << 20)

    write_atomically(path, write)


def _sync_folder(folder: Path) -> None:
    """Makes the names in it survive a power cut. Not every file system can; the files themselves are safe by then."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
