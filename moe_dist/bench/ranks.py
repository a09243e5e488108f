"""Runs ranks as processes of their own, which a benchmark or a test may kill, stop and continue; none outlives its deadline.

The rendezvous is a TCPStore server in the starting process: it lives outside the ranks, as a launcher's agent does.
A rank function is a module-level function `f(rank: Rank, *args)`; what it returns or raises comes back as an `Outcome`.
bench and tests import this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from moe_dist.distributed.group import RankGroup
from moe_dist.errors import GroupError

# Ranks are forked from a server that has imported torch and the core once, so that a rank starts in milliseconds.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.distributed", "moe_dist.layer", "moe_dist.bench.simulated"])


class RankHangs(AssertionError):
    """A rank was still running at its deadline: what this project promises never happens."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a rank ended. error: the exception's type name, "" for none, "killed" when the process died without a word."""

    value: Any = None
    error: str = ""
    message: str = ""
    culprits: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclasses.dataclass
class Rank:
    """What a rank function gets: its place, a folder shared with whoever started it, and its group."""

    index: int
    size: int
    port: int
    folder: Path

    def group(self, *, progress_timeout: float = 5.0, cap: float = 60.0, version: str | None = None) -> RankGroup:
        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        patience, longest = timedelta(seconds=progress_timeout), timedelta(seconds=cap)
        return RankGroup(store, self.index, self.size, version=version, progress_timeout=patience, cap=longest)

    def mark(self, name: str) -> None:
        """Tell whoever started the ranks, and the other ranks, that this point was reached."""
        (self.folder / f"mark-{name}").touch()

    def wait(self, name: str, timeout: float = 60.0) -> None:
        wait_for(self.folder / f"mark-{name}", timeout)


def wait_for(path: Path, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise RankHangs(f"{path.name} did not appear in {timeout:.0f} s")
        time.sleep(0.005)


def _main(function: Callable[..., Any], rank: Rank, args: tuple[Any, ...]) -> None:
    # Torch asks for the name of the address that it connects to. Where no name server answers, this ends it after 1 s instead of 10.
    os.putenv("RES_OPTIONS", "timeout:1 attempts:1")
    torch.set_num_threads(1)  # ranks share few cores: with a thread for each core in each rank they would wait for one another
    started = time.monotonic()
    try:
        outcome = Outcome(value=function(rank, *args))
    except BaseException as error:
        culprits = error.ranks if isinstance(error, GroupError) else ()
        outcome = Outcome(error=type(error).__name__, message=str(error) or traceback.format_exc(), culprits=culprits)
    outcome = dataclasses.replace(outcome, seconds=time.monotonic() - started)
    part = rank.folder / f"outcome-{rank.index}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(rank.folder / f"outcome-{rank.index}")
    os._exit(0)  # a store client's threads must not keep a finished rank


class Ranks:
    """`with Ranks(function, size, folder, *args) as ranks: ranks.kill(1); outcomes = ranks.join(deadline)`."""

    def __init__(self, function: Callable[..., Any], size: int, folder: Path, *args: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("outcome-*"), *folder.glob("mark-*")]:
            stale.unlink()
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._starts = [(function, Rank(index, size, self._server.port, folder), args) for index in range(size)]
        self._processes = [_FORKS.Process(target=_main, args=start, daemon=True) for start in self._starts]

    def __enter__(self) -> Ranks:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()

    def wait(self, mark: str, timeout: float = 60.0) -> None:
        wait_for(self.folder / f"mark-{mark}", timeout)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, and a start of another thread's has reaped it
            self.signal(rank, signal.SIGKILL)

    def start_again(self, rank: int) -> None:
        """`rank` alone, once its process is dead, on the rendezvous that its peers wait at."""
        self._processes[rank].join(60.0)
        self._processes[rank] = _FORKS.Process(target=_main, args=self._starts[rank], daemon=True)
        self._processes[rank].start()

    def join(self, deadline: float = 60.0) -> list[Outcome]:
        """Every rank's outcome. RankHangs: one is still there after `deadline` seconds."""
        until = time.monotonic() + deadline
        return [self.join_one(index, until - time.monotonic()) for index in range(len(self._processes))]

    def join_one(self, index: int, deadline: float) -> Outcome:
        process, path = self._processes[index], self.folder / f"outcome-{index}"
        process.join(max(0.0, deadline))
        if process.is_alive():
            raise RankHangs(f"rank {index} still runs at its deadline")
        outcome: Outcome = pickle.loads(path.read_bytes()) if path.exists() else Outcome(error="killed")
        return outcome


def run_ranks(function: Callable[..., Any], size: int, folder: Path, *args: Any, deadline: float = 60.0) -> list[Outcome]:
    with Ranks(function, size, folder, *args) as ranks:
        return ranks.join(deadline)
