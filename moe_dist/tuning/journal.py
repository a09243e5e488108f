"""Which candidate is running now, written down so that a crash can be blamed: `with journal.running(tactic_key): run()`.

Owns the marks and the rule that turns them into a quarantine; knows no tactic and no store. The tuner gives a journal to
its passes. A mark is a small file that names the process. Any orderly exit of the block, an exception included, removes it; a
process that dies inside leaves it. A candidate that was running at two deaths is quarantined for this host and environment:
one death may be chance (somebody killed the job), two are not taken for it.

The ranks of a job die together, when one crash ends them all, and that is one death: deaths count as several only when one
process had been started after the other's mark was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moe_dist.errors import DeviceLost
from moe_dist.process import boot_id, started_s

log = logging.getLogger("moe_dist.tuning")

DEATHS_TO_QUARANTINE = 2
_TIMING = "timing"  # begins the name of a file that marks one candidate after another


class Journal:
    """directory: local or shared between hosts. environment_digest: hex digits; other environments are judged apart.

    Never raises for a directory that can't be written: nothing is quarantined then, and one warning says so.
    """

    def __init__(self, directory: str | Path, environment_digest: str) -> None:
        host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node() or "localhost")
        self.folder = Path(directory).expanduser().absolute() / host / environment_digest
        self._warned = False

    @contextlib.contextmanager
    def running(self, tactic_key: str) -> Iterator[None]:
        """Marks the candidate while the block runs. tactic_key: any string that names problem, bucket and tactic."""
        with self._mark(_name(tactic_key)) as write:
            write(tactic_key)
            yield

    @contextlib.contextmanager
    def timing(self) -> Iterator[Callable[[str], None]]:
        """Marks the candidate that was last named to what it gives: for windows of time, which are too many for a file each."""
        with self._mark(_TIMING) as write:
            yield write

    @contextlib.contextmanager
    def _mark(self, name: str) -> Iterator[Callable[[str], None]]:
        """A file that holds the mark which was written last. It goes with the block, unless the process dies inside."""
        path = self.folder / f"{name}-{uuid.uuid4().hex}"
        mark, longest, handle = _Mark.now(""), 0, -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(error)

        def write(tactic_key: str) -> None:
            nonlocal longest
            if handle < 0:
                return
            text = json.dumps(vars(mark.again(tactic_key))).encode()
            longest = max(longest, len(text))
            try:
                os.pwrite(handle, text.ljust(longest), 0)  # one write over the last mark: a death in between leaves the one or the other
            except OSError as error:
                self._warn(error)

        died = False
        try:
            yield write
        except DeviceLost:
            died = True  # the process ends for this candidate's sake: as good as a death inside the block
            raise
        finally:
            if handle >= 0:
                os.close(handle)
            if not died:
                with contextlib.suppress(OSError):
                    path.unlink()

    def quarantined(self) -> dict[str, str]:
        """The candidates that must not run here, by their keys, and why."""
        found: dict[str, dict[Path, _Mark]] = {}
        for path, mark in self._dead():
            found.setdefault(mark.tactic_key, {})[path] = mark
        reasons = {}
        for tactic_key, marks in found.items():
            deaths = _separate(marks.values())
            if len(deaths) >= DEATHS_TO_QUARANTINE:
                last = deaths[-DEATHS_TO_QUARANTINE:]
                when = " and ".join(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mark.wall_s)) for mark in last)
                files = " ".join(map(str, sorted(marks)))
                reasons[tactic_key] = f"it was running when its process died, at {when}; to try it again, remove {files}"
        return reasons

    def clear(self) -> None:
        """Forget every death in this environment on this host, and so lift its quarantines. Live marks stay."""
        for path, _ in self._dead():
            with contextlib.suppress(OSError):
                path.unlink()

    def _dead(self) -> Iterator[tuple[Path, _Mark]]:
        try:
            paths = sorted(self.folder.glob("*"))
        except OSError as error:
            self._warn(error)
            return
        for path in paths:
            try:
                mark = _Mark(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                continue  # removed meanwhile, or being written, or not ours
            if not mark.alive():
                yield path, mark

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "journal %s: %s. A tactic that ends the process won't be recognised at the next start.", self.folder, error.strerror
            )


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Times are seconds since `boot`; `wall_s` is for people."""

    tactic_key: str
    boot: str
    pid: int
    started_s: float
    marked_s: float
    wall_s: float

    @classmethod
    def now(cls, tactic_key: str) -> _Mark:
        pid = os.getpid()
        return cls(tactic_key, boot_id(), pid, started_s(pid) or 0.0, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def again(self, tactic_key: str) -> _Mark:
        """What the same process writes now."""
        return dataclasses.replace(self, tactic_key=tactic_key, marked_s=time.clock_gettime(time.CLOCK_BOOTTIME), wall_s=time.time())

    def alive(self) -> bool:
        """The very process that wrote this still runs: not a later one of the same id, nor a zombie."""
        return self.boot == boot_id() and started_s(self.pid) == self.started_s


def _separate(marks: Iterable[_Mark]) -> list[_Mark]:
    """The longest row of deaths of which each process was started after the one before had marked the candidate."""
    row: list[_Mark] = []
    boots: dict[str, list[_Mark]] = {}
    for mark in sorted(marks, key=lambda mark: mark.wall_s):
        boots.setdefault(mark.boot, []).append(mark)
    # Within a boot by the time since it, which nobody sets.
    for mark in (mark for boot in boots.values() for mark in sorted(boot, key=lambda mark: mark.marked_s)):
        # The kernel rounds a start down to a clock tick, 10 ms; no job's ranks are that quick from start to first candidate.
        if not row or mark.boot != row[-1].boot or mark.started_s + 0.01 >= row[-1].marked_s:
            row.append(mark)
    return row


def _name(tactic_key: str) -> str:
    return hashlib.sha256(tactic_key.encode()).hexdigest()[:32]
