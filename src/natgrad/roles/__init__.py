"""Processes that do not train but help: stats workers and inverse workers (Ba, Grosse & Martens 2017, Figure 1).

Under `torchrun --nproc-per-node 4 script.py`, with this first in the script::

    role = natgrad.roles.take(stats=1, inverse=1)

two processes train, one computes statistics and one decomposes. Helpers never join a process group: they talk by TCP,
and training goes on when they die.
"""

from natgrad.roles.directory import Directory
from natgrad.roles.inverse import InverseWorkers, WorkerError
from natgrad.roles.role import Role, take
from natgrad.roles.stats import Desk, Line

__all__ = ["Desk", "Directory", "InverseWorkers", "Line", "Role", "WorkerError", "take"]
