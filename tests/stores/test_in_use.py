"""Stores as a tuner uses them over months: copied to other hosts, opened thousands of times, with entries that expire under it."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer

from moe_dist import autotune
from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.open import open_store
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import PassReport, Tuner

POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
COSTS = {"plain": 4000.0, "quick": 500.0}


def make_tuner(store: str, **settings: Any) -> Tuner:
    return Tuner(store=store, policy=POLICY, ladder=BucketLadder((1,)), device="cpu", **settings)


def tune(store: str, **settings: Any) -> PassReport:
    with make_tuner(store, **settings) as tuner:
        tuner.record(SimulatedOperation("layer", COSTS))
        return tuner.run_pass()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- copied


def copied(source: Path, target: Path) -> None:
    """As another tool leaves it on another host: other times, another owner, no write permission."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        os.utime(path, (1, 1))
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_copy_on_another_host_of_equal_environment_hits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tune(str(tmp_path / "here/store"))
    copied(tmp_path / "here/store", tmp_path / "there/another-name")
    again = tune(str(tmp_path / "there/another-name"))
    assert (first.measured, again.measured, again.hits, again.digest) == (2, 0, 1, first.digest)
    with make_tuner(str(tmp_path / "there/another-name")) as joiner:
        assert joiner.reload()
        assert joiner.epoch.digest == first.digest
    assert warnings_of(caplog) == []


def test_a_copy_on_a_host_of_another_environment_misses_and_says_once_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for versions in ({"foreign": "1", "other": "7"}, {"foreign": "1"}):
        tune(str(tmp_path / "here"), versions=versions)
    copied(tmp_path / "here", tmp_path / "there")
    for path in (tmp_path / "there").rglob("*"):
        path.chmod(0o755)
    caplog.clear()
    with make_tuner(str(tmp_path / "there"), versions={"foreign": "2"}) as tuner:
        tuner.record(SimulatedOperation("layer", COSTS))
        report = tuner.run_pass()
        tuner.record(SimulatedOperation("another", COSTS))
        tuner.run_pass()
    assert (report.measured, report.hits) == (2, 0)
    (said,) = warnings_of(caplog)
    assert f"store file://{tmp_path}/there has results of 2 other environments and none of this one; the nearest differs: " in said
    one, other = "(('foreign', '1'),)", "(('foreign', '1'), ('other', '7'))"  # equally near: both differ in one field
    assert said.endswith((f"backends {one}, here (('foreign', '2'),)", f"backends {other}, here (('foreign', '2'),)"))
    caplog.clear()
    # Nothing of the others was overwritten, and the second start hits and has nothing to say.
    for versions in ({"foreign": "1", "other": "7"}, {"foreign": "1"}, {"foreign": "2"}):
        assert tune(str(tmp_path / "there"), versions=versions).measured == 0
    assert warnings_of(caplog) == []


def test_after_an_upgrade_that_changes_no_winner_a_joiner_still_adopts(tmp_path: Path) -> None:
    """The table is the same, but the stored epoch was tuned in an environment that is no more: it is published anew, once."""
    before = tune(str(tmp_path))
    after = tune(str(tmp_path), versions={"foreign": "2"})
    assert (after.measured, after.digest, after.epoch) == (2, before.digest, before.epoch + 1)
    with make_tuner(str(tmp_path), versions={"foreign": "2"}) as joiner:
        assert joiner.reload()
        assert joiner.epoch.number == after.epoch
    assert tune(str(tmp_path), versions={"foreign": "2"}).epoch == after.epoch


def test_replicas_of_two_environments_under_one_deployment_each_join_the_newest_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two kinds of GPU, or an upgrade of one replica after the other."""
    for version in ("1", "2", "3"):
        tune(str(tmp_path), versions={"foreign": version})
    caplog.clear()
    for version, number in (("1", 1), ("2", 2), ("3", 3)):
        with make_tuner(str(tmp_path), versions={"foreign": version}) as joiner:
            joiner.record(SimulatedOperation("layer", COSTS))
            assert joiner.reload()
            assert joiner.epoch.number == number
    with make_tuner(str(tmp_path), versions={"foreign": "4"}) as joiner:
        joiner.record(SimulatedOperation("layer", COSTS))
        assert not joiner.reload()
    (refused,) = warnings_of(caplog)
    assert "it was tuned in another environment" in refused


def test_foreign_values_among_the_entries_explain_nothing_and_hurt_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FilesystemStore(tmp_path).put("entries/abc/def", b"not an entry")
    assert tune(str(tmp_path)).measured == 2
    assert warnings_of(caplog) == []


# --- expired


def expire(server: RedisServer) -> None:
    """What a TTL does in the middle of a run, without the wait."""
    with server.client() as client:
        assert client.dbsize() > 0
        assert all(client.pttl(name) > 0 for name in client.scan_iter())  # each has one
        client.flushall()


def test_entries_that_expire_under_a_tuner_are_served_on_and_published_again(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    url = f"redis://127.0.0.1:{server.port}?ttl=1000&timeout=20"
    with make_tuner(url) as tuner:
        tuner.record(SimulatedOperation("layer", COSTS))
        first = tuner.run_pass()
        expire(server)
        assert not make_tuner(url).reload()  # nobody can join now
        again = tuner.run_pass()
        assert (again.measured, again.hits, again.digest) == (0, 1, first.digest)
        with make_tuner(url) as joiner:
            assert joiner.reload()
            assert joiner.epoch.digest == first.digest
        expire(server)
        assert tuner.epoch.winners
    later = tune(url)
    assert (later.measured, later.hits) == (2, 0)
    assert warnings_of(caplog) == []


def test_a_layered_store_keeps_what_the_server_lets_go(server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"layered:{tmp_path}/local,redis://127.0.0.1:{server.port}?ttl=1000&timeout=20"
    first = tune(url)
    expire(server)
    again = tune(url)
    assert (again.measured, again.hits, again.digest) == (0, 1, first.digest)
    assert warnings_of(caplog) == []


def test_what_a_host_tuned_without_its_server_is_published_once_the_server_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the next start of that host, which measures nothing: others then join the epoch, and hit the entry."""
    server = RedisServer().start()
    url = f"redis://127.0.0.1:{server.port}?timeout=1"
    one, two = (f"layered:{tmp_path}/{host},{url}" for host in ("one", "two"))
    try:
        server.stop()
        alone = tune(one)
        assert [line for line in warnings_of(caplog) if "nobody can join until it is" in line]
        server.start()
        caplog.clear()
        again = tune(one)
        assert (again.measured, again.hits, again.digest, again.epoch) == (0, 1, alone.digest, alone.epoch)
        with make_tuner(two) as joiner:
            joiner.record(SimulatedOperation("layer", COSTS))
            assert joiner.reload()
            assert joiner.epoch.digest == alone.digest
        other = tune(f"{url}&ttl=1000", deployment="other")
        assert (other.measured, other.hits) == (0, 1)
        assert warnings_of(caplog) == []
    finally:
        server.__exit__()


class _Expiring:
    """The server lets go of everything just before each read."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "get_many", "list"):
            self.store._client.flushall()  # type: ignore[attr-defined]
        return getattr(self.store, name)


def _tune_while_all_expires(rank: Rank, url: str) -> tuple[str, int, list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_dist").addHandler(handler)
    store = _Expiring(url)
    store.store.put("warm/up", b"")
    with make_tuner(store, group=rank.group(), strategy="reload") as tuner:  # type: ignore[arg-type]
        tuner.record(SimulatedOperation("layer", COSTS))
        report = tuner.run_pass()
    return report.digest, report.measured, said


def test_a_table_that_expires_between_two_ranks_reads_is_sent_over_the_group(server: RedisServer, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{server.port}?ttl=1000&timeout=20"
    ended = run_ranks(_tune_while_all_expires, 2, tmp_path, url)
    assert [outcome.error for outcome in ended] == ["", ""], ended
    (digest, measured, said), other = ended[0].value, ended[1].value
    assert (other[0], other[1], measured) == (digest, measured, 2)
    assert [line for line in said if "is not shared with rank" in line]


# --- opened and closed ten thousand times


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def flat(times: int, action: Callable[[], None]) -> None:
    """`action` over and over leaves no thread, no file and no memory: less than a hundred bytes each time, where an object left is more.
    What leaks grows in each of four spans; the heap, which takes and keeps room by megabytes, does so in some of them at most."""
    for _ in range(times // 10):  # caches fill, pools grow
        action()
    gc.collect()
    threads, files, objects = threading.active_count(), open_files(), len(gc.get_objects())
    grown: list[int] = []
    for _ in range(4):
        gc.collect()
        resident = resident_bytes()
        for _ in range(times // 4):
            action()
        gc.collect()
        grown.append(resident_bytes() - resident)
    until = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)  # a thread that was told to end does so when it is next given a core
    assert threading.active_count() <= threads
    assert open_files() <= files
    assert min(grown) < 100 * (times // 4) + (1 << 18), grown
    assert len(gc.get_objects()) - objects < times // 100


# A tenth of them tune; the others open, run an empty pass and close. A tuner outlives its block, and is seldom closed by hand.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("times", "records", "closed"), [(10_000, False, True), (1_000, True, False)])
def test_tuner_contexts_leave_nothing(times: int, records: bool, closed: bool, tmp_path: Path) -> None:
    assert tune(str(tmp_path)).measured == 2
    operation = SimulatedOperation("layer", COSTS)

    def one_context() -> None:
        with autotune(store=str(tmp_path), policy=POLICY, ladder=BucketLadder((1,)), device="cpu") as tuner:
            if records:
                tuner.record(operation)
        assert bool(tuner.epoch.winners) is records
        if closed:
            tuner.close()

    flat(times, one_context)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "times"), [("file", 10_000), ("redis", 10_000), ("layered", 1_000)])
def test_stores_leave_nothing(kind: str, times: int, server: RedisServer, tmp_path: Path) -> None:
    unix = f"unix://{server.socket}?timeout=20"
    url = {"file": str(tmp_path), "redis": unix, "layered": f"layered:{tmp_path},{unix}"}[kind]
    open_store(url).put("a/b", b"1")

    def one_store() -> None:
        store = open_store(url)
        assert store.get("a/b") == b"1"
        store.close()

    flat(times, one_store)


def test_a_closed_store_holds_no_connection(server: RedisServer) -> None:
    with server.client() as client:
        before = client.info("clients")["connected_clients"]
        stores = [open_store(f"redis://127.0.0.1:{server.port}?timeout=20") for _ in range(20)]
        assert [store.get("a/b") for store in stores] == [None] * 20
        assert client.info("clients")["connected_clients"] == before + 20
        for store in stores:
            store.close()
        until = time.monotonic() + 30
        while client.info("clients")["connected_clients"] > before and time.monotonic() < until:
            time.sleep(0.01)  # the server sees it a moment later
        assert client.info("clients")["connected_clients"] == before
