"""Which process this is, in words that others can judge: whether it still runs, and whether that can be told from where they are.

Knows Linux's /proc; elsewhere nothing can be told of another process. Anyone may import this; it imports nothing of ours.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of one host, and no later one of the same id. boot: the host's, between two starts; "": not known. namespace: of
    process ids, of which each container has its own. started_s: seconds from boot to the process' start."""

    host: str
    boot: str
    namespace: str
    pid: int
    started_s: float

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(platform.node(), boot_id(), _namespace(), pid, started_s(pid) or 0.0)

    def to_text(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_text(cls, text: str) -> Process:
        return cls(*json.loads(text))

    def runs(self) -> bool | None:
        """Whether it still runs (a zombie does not); None: it can't be told here, since it is of another host or container."""
        if not self.boot or (self.boot, self.namespace) != (boot_id(), _namespace()):
            return None
        return started_s(self.pid) == self.started_s

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def boot_id() -> str:
    """Changes with each start of the host; "": not known here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def started_s(pid: int) -> float | None:
    """When the process was started, in seconds since boot; None: there is none (or it is a zombie)."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
