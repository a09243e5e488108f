"""A store that fails between a pass's entries and its epoch: the ranks serve what they agreed on, nobody joins half of it, and what
it did not take is published by the next pass that it can take it from."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeOperation
from ranks import Rank, Ranks, run_ranks
from redis_server import RedisServer
from tmpfs import tmpfs

from moe_dist.bench.scarcity import fill_disk
from moe_dist.stores.redis import RedisStore
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner

COSTS: dict[str, float | str] = {"plain": 30_000.0, "quick": 1000.0}
SETTINGS: dict[str, Any] = {
    "policy": MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1)), "ladder": BucketLadder((1,)), "deployment": "d",
    "device": "cpu",
}  # fmt: skip


class Watched(RedisStore):
    """From its second epoch on it says when one is about to be published, once, and waits until the server has been killed."""

    rank: Rank
    epochs = 0

    def _write(self, key: str, value: bytes) -> None:
        if key.startswith("epochs/"):
            self.epochs += 1
            if self.epochs == 2:
                self.rank.mark("entries-published")
                self.rank.wait("killed")
        super()._write(key, value)


def tunes_on(rank: Rank, strategy: str, url: str) -> Any:
    """What was degraded, warned of, and served by each of three passes: before the server dies, while, and when it is back."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_dist").addHandler(handler)
    store = Watched.from_url(url, retry_after=timedelta(0))
    assert isinstance(store, Watched)
    store.rank = rank
    with Tuner(store=store, group=rank.group(progress_timeout=90.0, cap=150.0), strategy=strategy, **SETTINGS) as tuner:
        passes = []
        for name in ("a", "b", "b"):
            if len(passes) == 2:
                rank.mark(f"went-on-{rank.index}")
                rank.wait("back", 120.0)
            tuner.record(FakeOperation(name, COSTS))
            report = tuner.run_pass()
            won = {str(row.winner.tactic["name"]) if row.winner else "untuned" for row in report.rows}
            passes.append((won, len(tuner.epoch.winners), report.measured, report.digest, store.degraded))
        return passes, said


def joins(rank: Rank, url: str) -> Any:
    with Tuner(store=url, **SETTINGS) as tuner:
        return tuner.reload(), len(tuner.epoch.winners), tuner.epoch.digest


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_epoch_that_a_killed_server_did_not_take_is_published_when_it_is_back(strategy: str, tmp_path: Path) -> None:
    with RedisServer(durable=True) as server:
        url = f"unix://{server.socket}?timeout=20"
        with Ranks(tunes_on, 2, tmp_path / "ranks", strategy, url) as ranks:
            ranks.wait("entries-published")
            with server.client() as client:
                held = [name.decode() for name in client.scan_iter()]
            server.stop()
            (ranks.folder / "mark-killed").touch()
            for index in range(2):
                ranks.wait(f"went-on-{index}")
            server.start()
            (early,) = run_ranks(joins, 1, tmp_path / "early", url)
            (ranks.folder / "mark-back").touch()
            outcomes = ranks.join(90.0)
        (late,) = run_ranks(joins, 1, tmp_path / "late", url)
    assert [outcome.error for outcome in (*outcomes, early, late)] == [""] * 4, (outcomes, early, late)
    assert sum("{entries/" in name for name in held) == 2, "the entries of both passes were there when the server died"
    assert sum("{epochs/" in name for name in held) == 1
    (passes, said), (peers, _) = outcomes[0].value, outcomes[1].value
    assert [row[:4] for row in passes] == [row[:4] for row in peers], "both ranks serve the same after every pass"
    assert [row[:3] for row in passes] == [({"quick"}, 1, 2), ({"quick"}, 2, 2), ({"quick"}, 2, 0)]
    before, meanwhile, back = passes
    assert (before[4], back[4]) == (None, None)
    assert "ConnectionError" in meanwhile[4]
    assert [line for line in said if "Going on in memory" in line and "ConnectionError" in line], said
    assert [line for line in said if "epoch 2 could not be published" in line and "nobody can join until it is" in line], said
    assert early.value == (True, 1, before[3]), "who joins then finds the epoch before, whole"
    assert meanwhile[3] == back[3]
    assert late.value == (True, 2, back[3])


def test_what_a_full_disk_did_not_take_is_published_when_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with tmpfs(folder, "256k"), Tuner(store=str(folder), **SETTINGS) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        tuner.record(FakeOperation("b", COSTS))
        fill_disk(folder)
        report = tuner.run_pass()
        kept = report.digest
        assert "No space left on device" in str(tuner.store.degraded)
        with Tuner(store=str(folder), **SETTINGS) as joiner:
            assert (joiner.reload(), len(joiner.epoch.winners)) == (True, 1)
        (folder / "filler").unlink()
        again = tuner.run_pass()
        assert (again.hits, again.measured, again.digest) == (2, 0, kept)
        with Tuner(store=str(folder), **SETTINGS) as joiner:
            for name in "ab":
                joiner.record(FakeOperation(name, COSTS))
            assert (joiner.reload(), joiner.epoch.digest) == (True, kept)
            report = joiner.run_pass()
            assert (report.hits, report.measured) == (2, 0), "the entries lie there, too"
