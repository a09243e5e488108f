"""Who is lost, when, and who is blamed: progress, the deadline and the cap, with ranks as threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgpack
import pytest
from distributed.in_threads import Make, opened, results, together
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed import group as module
from moe_dist.distributed import rendezvous
from moe_dist.distributed.group import RankGroup
from moe_dist.errors import (
    RankLost,
    TunerStateError,
)


def test_a_silent_rank_is_lost_after_the_progress_timeout_and_the_group_is_dead(make: Make) -> None:
    ranks = opened(make(3, progress=0.5, names=[4, 5, 6]))
    started = time.monotonic()
    errors = results(together(ranks[:2], lambda rank: rank.exchange("agree", b"")))
    assert time.monotonic() - started < 10
    assert [(type(error), str(error), error.ranks) for error in errors] == [
        (RankLost, "rank 6 lost in pass 1, step agree: no progress for 0 s", (6,))
    ] * 2
    with pytest.raises(TunerStateError, match="this group is dead"):
        ranks[0].begin_pass()


def test_a_leader_that_moves_between_passes_is_waited_for_in_the_next_one(make: Make) -> None:
    """It publishes what the last pass came to, while its peers are in the next one already."""

    def two_passes(rank: RankGroup) -> list[bytes]:
        for number in (1, 2):
            rank.begin_pass()
            words = rank.exchange("one", b"%d" % number)
            rank.commit("t")
            if number == 1 and rank.is_leader:
                until = time.monotonic() + 6.0
                while time.monotonic() < until:
                    time.sleep(0.05)
                    rank.progress()
        return words

    assert results(together(make(2, progress=2.0), two_passes)) == [[b"2", b"2"]] * 2


class _SlowToPublish:
    """A leader's view of the rendezvous: what it publishes takes a while to get there."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def clone(self) -> _SlowToPublish:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        if key.endswith("/all"):
            time.sleep(self._seconds)
        self._store.set(key, value)


def test_a_rank_that_moves_is_waited_for_beyond_the_progress_timeout_and_the_leader_is_not_blamed_for_it(make: Make) -> None:
    """Ranks 0 and 2 wait 3 s for rank 1, which works: longer than the 2 s for one that is silent. Once it has spoken, the leader has its own 2 s to publish; it needs 1."""
    store = HashStore()
    (leader,) = make(1, _SlowToPublish(store, 1.0), of=3, progress=2.0)
    others = make(2, store, of=3, first=1, progress=2.0)

    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        for _ in range(10 if rank.rank == 1 else 0):
            time.sleep(0.3)
            rank.progress()
        return rank.exchange("agree", b"%d" % rank.rank)

    assert results(together([leader, *others], talk)) == [[b"0", b"1", b"2"]] * 3


class _Requests:
    """A rank's view of the rendezvous that counts its requests and, of these, the looks around."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests, self.looks = store, 0, 0

    def clone(self) -> _Requests:
        return self

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.requests += name != "has_extended_api"
            self.looks += name == "check" and args[0][0].endswith("/verdict")
            return getattr(self._store, name)(*args)

        return request


def test_waiting_for_a_late_rank_costs_each_rank_a_few_requests_a_look_however_many_they_are(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of 32 speaks when all others have looked around four times. Each asking about each would be 30 requests a look."""
    monkeypatch.setattr(module, "_POLL_S", 0.1)  # a few polls a look, so that they hide nothing
    monkeypatch.setattr(module, "_SLOWEST_POLL_S", 0.1)
    size, store = 32, HashStore()
    views = [_Requests(store) for _ in range(size)]
    ranks = [make(1, view, of=size, first=rank, progress=60.0, cap=120.0, version="9.1")[0] for rank, view in enumerate(views)]
    before = [view.requests for view in views]

    def talk(rank: RankGroup) -> bytes:
        rank.begin_pass()
        deadline = time.monotonic() + 60
        while rank.rank == size - 1 and min(view.looks for view in views[:-1]) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return rank.reduce("measure", b"x", lambda words: b"all")

    assert results(together(ranks, talk)) == [b"all"] * size
    looks, requests = sum(view.looks for view in views), sum(view.requests - start for view, start in zip(views, before, strict=True))
    assert requests < 10 * looks + 12 * size, f"{requests} requests in {looks} looks"


class _Frozen:
    """A rank's view of the rendezvous: the first rank of all that watches for the others gets no further until it is let go."""

    def __init__(self, store: Any, frozen: list[Any], go: threading.Event) -> None:
        self._store, self._frozen, self._go = store, frozen, go

    def clone(self) -> _Frozen:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        said = self._store.compare_set(key, expected, desired)
        if "/watch/" in key and not self._frozen and bytes(said).decode() == desired:
            self._frozen.append(self)
            self._go.wait(60)
        return said


def test_another_rank_watches_when_the_one_that_did_is_stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT", timedelta(seconds=60))
    store, go, frozen = HashStore(), threading.Event(), list[Any]()
    views = [_Frozen(store, frozen, go) for _ in range(3)]
    ranks = [make(1, view, of=4, first=rank, cap=60.0)[0] for rank, view in enumerate(views)]
    opened(ranks)
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(rank.exchange, "agree", b"") for rank in ranks]
        deadline = time.monotonic() + 30
        while sum(end.done() for end in ends) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        waiting = [view for view, end in zip(views, ends, strict=True) if not end.done()]
        go.set()
        errors = [end.exception(30) for end in ends]
    assert waiting == frozen, "the others end without it"
    assert [(type(error), str(error)) for error in errors] == [(RankLost, "rank 3 lost in pass 1, step agree: no progress for 1 s")] * 3


class _SlowToSend:
    """A rank's view of the rendezvous: the bytes of its long word take a while to get there, and it moves meanwhile."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def clone(self) -> _SlowToSend:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        for moved in range(int(self._seconds / 0.3) if "/bytes/" in key else 0):
            time.sleep(0.3)
            self._store.set(key.replace("/1/000001/bytes/", "/progress/"), f"sending {moved}")
        self._store.set(key, value)


def test_a_rank_that_waits_for_the_bytes_of_a_word_is_not_blamed_by_ranks_that_need_none(make: Make) -> None:
    """Rank 1 sends for 3 s what rank 2 needs; ranks 0 and 3 are in the next step, where both are missing, for longer than the timeout."""
    store = HashStore()
    ranks = [make(1, _SlowToSend(store, 3.0) if rank == 1 else store, of=4, first=rank, progress=1.5)[0] for rank in range(4)]

    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        rank.exchange("hits", b"entry" * 100 if rank.rank == 1 else b"", reads={1} if rank.rank == 2 else set())
        return rank.exchange("agree", b"")

    assert results(together(ranks, talk)) == [[b""] * 4] * 4


def test_a_leader_whose_words_have_all_come_waits_for_nobody(make: Make) -> None:
    leader, other = opened(make(2))
    for rank in (leader, other):
        rank._rendezvous._store.set(rank._key(f"000001/{rank.rank}"), b"")
    assert leader._silent("000001") == []
    assert other._silent("000001") == [0]


def test_the_cap_ends_a_wait_for_a_rank_that_moves_for_ever(make: Make) -> None:
    """For six times the cap, that is; then it speaks, so that without the cap this ends, too."""
    waiting, working = opened(make(2, progress=30.0, cap=1.0))
    stop = threading.Event()

    def work() -> None:
        for _ in range(60):
            if stop.wait(0.1):
                return
            working.progress(force=True)
        working._rendezvous._store.set(working._key("000001/1"), msgpack.packb(["a pass, step agree", b"late"]))

    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(work)
        ended = pool.submit(waiting.exchange, "agree", b"").exception(20)
        stop.set()
        done.result(10)
    assert isinstance(ended, RankLost), "awaited was RankLost at the cap of 1 s, but rank 1 was waited for until it spoke, after 6 s"
    assert str(ended) == "rank 1 lost in pass 1, step agree: the pass outlasted its cap of 1 s"


def test_a_leader_that_does_not_commit_is_lost(make: Make) -> None:
    ranks = opened(make(2, progress=0.5))
    results(together(ranks, lambda rank: rank.exchange("decide", b"")))
    with pytest.raises(RankLost, match="rank 0 lost in pass 1, step commit") as told:
        ranks[1].commit("table")
    assert told.value.ranks == (0,)
    with pytest.raises(RankLost, match="rank 0 lost"):
        ranks[0].commit("table")  # the leader comes back, and learns that it was given up
