"""A server that is slow and not dead: how long a listing of its database may take, and who may take the rank that waits for one for lost."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from redis_server import RedisServer
from redis_urls import url_of
from slow_end import SlowEnd

import moe_dist.stores.redis as redis_store
from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.stores.base import reporting
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore, ReadOnlyStore
from moe_dist.stores.memory import MemoryStore
from moe_dist.stores.open import open_store
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner

FOREIGN = 100_000  # keys of others: a hundred trips of a listing
PROGRESS_TIMEOUT_S = 5.0
DELAY_S = 0.08  # so a listing takes 8 s at least


@pytest.fixture(scope="module")
def crowded():
    """A server whose database is others', but for nothing."""
    with RedisServer() as server, server.client() as client:
        for start in range(0, FOREIGN, 10_000):
            client.mset({f"stranger:{number}": b"" for number in range(start, start + 10_000)})
        yield server


def test_a_listing_says_at_every_trip_that_it_goes_on(crowded):
    store, said = open_store(url_of(crowded)), []
    with reporting(store, lambda: said.append(1)):
        assert store.list("entries") == []
    assert len(said) > FOREIGN // 1000
    said.clear()
    store.list("entries")
    assert said == []
    assert store.degraded is None


def test_a_listing_in_which_nothing_is_ours_ends_at_its_limit(crowded, monkeypatch):
    monkeypatch.setattr(redis_store, "_SCAN_LIMIT_S", 1.0)
    with SlowEnd(crowded.port, DELAY_S) as slow:
        store = open_store(f"redis://127.0.0.1:{slow.port}?timeout=20")
        assert store.list("entries") == []
        assert store.degraded == "SCAN took more than 1 s; give moe_dist a database of its own"
        assert slow.trips < 30  # of a hundred
        assert store.put("x/y", b"1")  # the server is not left alone for it
        store.delete("x/y")


def test_every_store_says_that_its_calls_go_on(server, tmp_path):
    local, shared = FilesystemStore(tmp_path), open_store(url_of(server))
    for store in (local, shared, LayeredStore(local, shared), ReadOnlyStore(local), ReadOnlyStore(LayeredStore(local, shared))):
        for call, argument in (("get", "a/b"), ("list", "a"), ("get_many", ["a/c", "a/d"])):
            said = []
            with reporting(store, partial(said.append, 1)):
                getattr(store, call)(argument)
            assert said, (store, call)
    with reporting(MemoryStore(), lambda: pytest.fail("memory takes no time")):
        pass


def test_an_attempt_that_failed_has_gone_on(monkeypatch):
    said = []
    monkeypatch.setattr(time, "sleep", lambda seconds: said.append("pause"))
    store = open_store("redis://127.0.0.1:1?timeout=0.1")
    with reporting(store, lambda: said.append("goes on")):
        assert store.get("x/y") is None
    assert said == ["goes on", "goes on", *["pause", "goes on"] * 2]


def _tune(rank: Rank, slow: str, quick: str) -> tuple[str, int, float]:
    """The leader's link is slow."""
    store = slow if rank.index == 0 else quick
    with Tuner(
        store=store, group=rank.group(progress_timeout=PROGRESS_TIMEOUT_S, cap=150), ladder=BucketLadder((1,)), device="cpu"
    ) as tuner:  # fmt: skip
        tuner.record(SimulatedOperation("layer", {"plain": 2000.0, "quick": 500.0}))
        began = time.monotonic()
        report = tuner.run_pass()
        return report.digest, report.measured, time.monotonic() - began


@pytest.mark.timeout(300)
def test_a_leader_that_lists_a_crowded_database_is_not_lost(crowded: RedisServer, tmp_path: Path) -> None:
    """It lists twice while its peer waits: to say why nothing that is there fits, and while the group decides."""
    with SlowEnd(crowded.port, DELAY_S) as slow:
        ended = run_ranks(
            _tune, 2, tmp_path, f"redis://127.0.0.1:{slow.port}?timeout=20", url_of(crowded), deadline=200.0
        )  # fmt: skip
        assert [outcome.error for outcome in ended] == ["", ""], ended
        leader, peer = (outcome.value for outcome in ended)
        assert leader[:2] == peer[:2]
        assert slow.trips > 2 * FOREIGN // 1000
        assert leader[2] > 2 * PROGRESS_TIMEOUT_S
