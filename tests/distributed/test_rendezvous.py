"""Stores that serve as a rendezvous, in other ways or no longer."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from distributed.in_threads import Make, opened, results, together
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from moe_dist.distributed import rendezvous
from moe_dist.distributed.group import RankGroup
from moe_dist.errors import (
    RendezvousLost,
    TunerStateError,
)


def test_a_rendezvous_that_reads_one_value_at_a_time_serves_too(make: Make, tmp_path: Path) -> None:
    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        return rank.exchange("agree", b"%d" % rank.rank)

    assert results(together(make(3, FileStore(str(tmp_path / "rendezvous"), 3)), talk)) == [[b"0", b"1", b"2"]] * 3


class _Stuck:
    """A rendezvous whose server stops answering."""

    def __init__(self, store: Any) -> None:
        self._store, self.stuck = store, threading.Event()

    def clone(self) -> _Stuck:
        return self

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            if self.stuck.is_set():
                time.sleep(3.0)
            return getattr(self._store, name)(*args)

        return request


def test_a_rendezvous_that_stops_answering_is_lost_in_bounded_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT", timedelta(seconds=0.3))
    store = _Stuck(HashStore())
    rank = opened(make(2, store, host=0))[1]
    store.stuck.set()
    started = time.monotonic()
    with pytest.raises(RendezvousLost, match="the rendezvous store, which rank 0 serves, can't be reached") as told:
        rank.exchange("agree", b"")
    assert time.monotonic() - started < 2.5
    assert told.value.ranks == (0,)
    with pytest.raises(TunerStateError, match=r"dead \(rendezvous lost\)"):
        rank.begin_pass()
    store.stuck.clear()
    with pytest.raises(RendezvousLost, match="the rendezvous store was lost; the group is dead") as told:
        rank._rendezvous.holds("key")  # by a server that answers again: peers have concluded that this rank is gone
    assert told.value.ranks == (0,)


SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_group_that_is_made_while_the_rendezvous_is_stopped_ends_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection of its own is the first thing that it asks for, and torch waits for that without an end."""
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT", timedelta(seconds=1))
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        store.set("seen", "yes")
        server.send_signal(signal.SIGSTOP)
        ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def make() -> None:
            try:
                RankGroup(store, 1, 2)
                ends.put(None)
            except RendezvousLost as error:
                ends.put(error)

        threading.Thread(target=make, daemon=True).start()  # which a group that waits without an end would keep
        lost = ends.get(timeout=15)
        assert "the rendezvous store can't be reached (no answer in 1 s)" in str(lost)
    finally:
        server.kill()
        server.communicate()
