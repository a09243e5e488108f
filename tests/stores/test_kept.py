"""What a medium did not take: who sees it, until when, and what becomes of it once the medium takes writes again."""

from __future__ import annotations

import errno
import logging
import os
import time
from datetime import timedelta

import pytest
from redis_server import RedisServer
from redis_urls import AT_ONCE, url_of

from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.stores import filesystem
from moe_dist.stores.degrade import DegradingStore, Unavailable
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore
from moe_dist.stores.redis import RedisStore
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner


@pytest.fixture
def mortal():
    """A server that a test may kill and start again; it starts empty."""
    with RedisServer() as server:
        yield server


def opened(server, query="timeout=1", retry_after=AT_ONCE):
    return RedisStore.from_url(url_of(server, query), retry_after=retry_after)


def refuse_writes(server, refused=True):
    with server.client() as client:
        client.config_set("maxmemory", 1 if refused else 0)  # nothing may be evicted: that is the default


# --- killed and started again


def test_what_was_kept_is_written_once_the_server_is_back(mortal):
    store, other = opened(mortal), opened(mortal)
    mortal.stop()
    assert not store.put("x/one", b"1")
    assert not store.put("x/two", b"2")
    mortal.start()
    assert store.get("x/one") == b"1"  # the first call that reaches it writes both
    assert other.get_many(["x/one", "x/two"]) == {"x/one": b"1", "x/two": b"2"}
    other.put("x/one", b"3")
    assert store.get("x/one") == b"3"  # it is the server's now, as any other
    assert store.degraded is None


@pytest.mark.parametrize("call", ["get", "list", "put", "delete"])
def test_any_call_that_reaches_the_server_writes_what_was_kept(call, mortal):
    store, other = opened(mortal), opened(mortal)
    mortal.stop()
    assert not store.put("x/kept", b"1")
    mortal.start()
    getattr(store, call)(*{"list": ["y"], "put": ["y/z", b"2"]}.get(call, ["y/z"]))
    assert other.get("x/kept") == b"1"


@pytest.mark.parametrize("look", ["get", "list first", "put another"])
def test_the_newer_value_of_another_writer_stands(look, mortal):
    store, other = opened(mortal), opened(mortal)
    assert store.put("x/y", b"old")
    mortal.stop()
    assert not store.put("x/y", b"kept")
    assert store.get("x/y") == b"kept"
    mortal.start()
    assert other.put("x/y", b"newer")
    if look == "list first":
        assert store.list("x") == ["x/y"]
    elif look == "put another":
        assert store.put("x/z", b"1")
    assert store.get("x/y") == b"newer"
    assert other.get("x/y") == b"newer"


def test_a_key_that_another_writer_has_made_is_not_deleted_by_what_was_kept(mortal):
    store, other = opened(mortal), opened(mortal)
    assert store.put("x/y", b"old")
    mortal.stop()
    store.delete("x/y")
    assert store.list("x") == []
    mortal.start()
    assert other.put("x/y", b"newer")
    assert store.list("x") == ["x/y"]
    assert store.get("x/y") == b"newer"
    assert other.get("x/y") == b"newer"


def test_in_a_layered_store_the_newer_value_of_another_host_reaches_the_local_layer(mortal, tmp_path):
    store = LayeredStore(FilesystemStore(tmp_path), opened(mortal))
    mortal.stop()
    assert not store.put("x/y", b"kept")
    assert not store.put("x/z", b"kept")
    mortal.start()
    assert opened(mortal).put("x/y", b"newer")
    assert store.get_many(["x/y", "x/z"]) == {"x/y": b"newer", "x/z": b"kept"}
    assert store.local.get("x/y") == b"newer"
    assert opened(mortal).get("x/z") == b"kept"


def test_what_a_running_tuner_could_not_publish_admits_joiners_once_the_server_is_back(mortal, caplog):
    """Without another pass of it, and without another start of its process."""

    def tuner(retry_after=AT_ONCE):
        made = Tuner(store=opened(mortal, retry_after=retry_after), ladder=BucketLadder((1,)), device="cpu")
        made.record(SimulatedOperation("layer", {"plain": 2000.0, "quick": 500.0}))
        return made

    with tuner() as first:
        mortal.stop()
        tuned = first.run_pass()
        assert [record for record in caplog.records if "nobody can join until it is" in record.getMessage()]
        mortal.start()
        with tuner() as joiner:
            assert not joiner.reload()
        assert first.reload()  # it has its own epoch, and looks whether there is a newer one
        with tuner() as joiner:
            assert joiner.reload()
            assert joiner.epoch.digest == tuned.digest
        with tuner() as another:
            assert (another.run_pass().measured, another.epoch.digest) == (0, tuned.digest)
    for one in (joiner, another, first):
        one.store.close()


# --- a server that reads and takes no writes


def test_a_value_that_was_refused_hides_the_older_one_and_not_a_newer_one(mortal):
    store, other = opened(mortal), opened(mortal)
    assert other.put("x/one", b"old")
    assert other.put("x/two", b"old")
    refuse_writes(mortal)
    for key in ("x/one", "x/two"):  # never read by this process
        assert not store.put(key, b"kept")
        assert store.get(key) == b"kept"
    assert opened(mortal).get("x/one") == b"old"
    refuse_writes(mortal, False)
    assert other.put("x/two", b"newer")
    assert store.get_many(["x/one", "x/two"]) == {"x/one": b"kept", "x/two": b"newer"}
    assert other.get_many(["x/one", "x/two"]) == {"x/one": b"kept", "x/two": b"newer"}


def test_a_value_that_this_process_put_before_it_lost_the_server_is_older_than_what_was_kept(mortal):
    store, other = opened(mortal), opened(mortal)
    assert store.put("x/y", b"old")
    mortal.stop()
    assert not store.put("x/y", b"kept")
    mortal.start()
    with mortal.client() as client:
        client.set("moe_dist:{x}/y", b"old")  # as a server with its data on a disk would have it
    assert store.get("x/y") == b"kept"
    assert other.get("x/y") == b"kept"


def test_a_deletion_that_was_refused_is_done_later(mortal):
    with RedisServer() as elsewhere:
        store, other = opened(mortal), opened(mortal)
        assert other.put("x/y", b"old")
        with mortal.client() as client:
            client.config_set("replica-serve-stale-data", "yes")
            client.replicaof("127.0.0.1", elsewhere.port)
            store.delete("x/y")
            assert "ReadOnly" in store.degraded
            assert store.list("x") == []
            client.replicaof("NO", "ONE")
        assert other.put("x/z", b"1")
        assert store.list("x") == ["x/z"]
        assert other.get("x/y") is None


def test_a_server_that_refuses_is_not_asked_again_at_every_call(mortal):
    store = opened(mortal, retry_after=timedelta(hours=1))
    refuse_writes(mortal)
    for number in range(5):
        assert not store.put(f"x/k{number}", b"1")
    with mortal.client() as client:
        client.config_resetstat()
        for _ in range(20):
            assert store.get_many([f"x/k{number}" for number in range(5)]).keys() == {f"x/k{number}" for number in range(5)}
            assert store.degraded is None  # the read did reach it
        assert "cmdstat_set" not in client.info("commandstats")
        refuse_writes(mortal, False)
        assert store.put("x/other", b"1")  # it takes writes again, as this one shows
        assert client.dbsize() == 6


class Counting(DegradingStore):
    """A medium that refuses all writes until it is told otherwise, each of which takes 0.4 s. written: the keys that it was asked to take."""

    def __init__(self, now_s):
        super().__init__("counting:", retry_after=timedelta(seconds=100))
        self.now_s, self.refuses, self.written, self.values = now_s, True, [], {}

    def _read(self, keys):
        return {key: self.values[key] for key in keys if key in self.values}

    def _write(self, key, value):
        self.now_s[0] += 0.4
        self.written.append(key)
        if self.refuses:
            raise Unavailable("full")
        self.values[key] = value

    def _remove(self, key): ...

    def _scan(self, prefix):
        return [*self.values]

    def close(self): ...


def test_what_was_kept_is_written_with_pauses_and_a_part_with_each_call(monkeypatch):
    """A medium that refuses is asked with one value, and then left alone; one that takes them holds no call up for more than a second."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    store = Counting(now_s)
    keys = [f"x/k{number}" for number in range(7)]
    for key in keys:
        assert not store.put(key, b"1")

    def asked_by_calls(count):
        store.written.clear()
        for _ in range(count):
            assert store.get_many(keys) == dict.fromkeys(keys, b"1")
        return store.written

    assert asked_by_calls(5) == []
    now_s[0] += 130  # the longest pause is 125
    assert asked_by_calls(5) == keys[:1]
    now_s[0] += 130
    store.refuses = False
    assert asked_by_calls(1) == keys[1:4]  # the third begins after 0.8 s
    assert asked_by_calls(1) == keys[4:]
    assert asked_by_calls(5) == keys[:1], "what was refused is last"
    assert store.list("") == keys


def test_a_value_that_the_server_takes_from_nobody_keeps_no_other_from_it(mortal):
    """It ends the connection of who sends more than this, as if it were gone; all else goes on, and no call tries that value again and
    again."""
    store, other = opened(mortal, "timeout=20", retry_after=timedelta(hours=1)), opened(mortal, "timeout=20")
    assert other.put("y/z", b"1")
    with mortal.client() as client:
        client.config_set("client-query-buffer-limit", 1 << 20)
        assert not store.put("x/large", bytes(8 << 20))
        store._down_until_s = 0.0  # an hour later
        store._kept.values["x/kept"] = b"2"  # of the same hour
        for number in range(3):
            assert store.get("y/z") == b"1"
            assert store.put(f"x/{number}", b"3")
            assert store.degraded is None
        assert other.list("x") == ["x/0", "x/1", "x/2", "x/kept"]
        assert store.get("x/large") == bytes(8 << 20)
        assert client.info("stats")["client_query_buffer_limit_disconnections"] == 6  # two times three attempts
        client.config_set("client-query-buffer-limit", 1 << 30)
        store._refused.clear()  # an hour later
        assert store.put("x/0", b"3")
        assert other.get("x/large") == bytes(8 << 20)


def test_a_value_that_is_refused_alone_holds_up_no_other(tmp_path):
    """A folder that is no store's lies where its file would be."""
    store, other = FilesystemStore(tmp_path), FilesystemStore(tmp_path)
    (tmp_path / "x/bad+value").mkdir(parents=True)
    for key in ("x/bad", "x/good"):
        store._kept.values[key] = b"1"  # as a full disk left them
    for _ in range(2):
        assert store.put("x/y", b"2")
    assert other.list("x") == ["x/good", "x/y"]
    (tmp_path / "x/bad+value").rmdir()
    assert store.put("x/y", b"2")
    assert other.get("x/bad") == b"1"


# --- a disk


def test_a_disk_that_takes_writes_again_is_written(tmp_path, monkeypatch):
    store, other = FilesystemStore(tmp_path), FilesystemStore(tmp_path)
    assert other.put("x/two", b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        for key in ("x/one", "x/two", "x/three"):
            assert not store.put(key, b"kept")
        store.delete("x/two")
        assert store.put("x/three", b"kept") is False
    assert other.put("x/three", b"newer")
    assert store.put("x/four", b"1")
    assert other.get_many(["x/one", "x/two", "x/three", "x/four"]) == {"x/one": b"kept", "x/three": b"newer", "x/four": b"1"}
    assert store.get("x/three") == b"newer"


def test_nothing_that_no_caller_asked_for_is_said(mortal, caplog):
    """Writing what was kept may fail again: the call that came by reached the server, and the warning was given."""
    store = opened(mortal)
    refuse_writes(mortal)
    assert not store.put("x/y", b"1")
    caplog.clear()
    for _ in range(3):
        assert store.get("x/z") is None
        assert store.degraded is None
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_kept_key_that_cannot_be_read_makes_no_other_call_a_failure(tmp_path, monkeypatch):
    store = FilesystemStore(tmp_path)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        assert not store.put("x/kept", b"1")
    monkeypatch.setattr(filesystem, "_read_file", fail)
    assert store.put("x/y", b"2")
    assert store.degraded is None
