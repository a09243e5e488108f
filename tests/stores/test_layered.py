"""Local over shared, as two hosts see it (a directory each, one server), and a store that is never written."""

from __future__ import annotations

import errno
import logging
from datetime import timedelta

import pytest
from redis_server import RedisServer

from moe_dist.errors import StoreError
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore, ReadOnlyStore, found_by_others
from moe_dist.stores.memory import MemoryStore
from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisStore


@pytest.fixture
def hosts(server, tmp_path):
    url = f"redis://127.0.0.1:{server.port}?timeout=20"
    return [open_store(f"layered:{tmp_path}/{host},{url}") for host in ("one", "two")]


def test_what_one_host_publishes_the_other_finds_and_keeps(hosts, server):
    one, two = hosts
    assert one.put("x/y", b"1")
    assert two.get("x/y") == b"1"
    with server.client() as client:
        client.flushall()
    assert two.local.get("x/y") == b"1"
    assert two.get("x/y") == one.get("x/y") == b"1"
    assert two.list("x") == ["x/y"]


def test_the_shared_store_knows_what_is_newest(hosts):
    one, two = hosts
    one.put("x/y", b"1")
    assert two.get("x/y") == b"1"
    one.put("x/y", b"2")
    assert two.get("x/y") == b"2"
    assert two.local.get("x/y") == b"2"


def test_what_others_find_is_neither_the_local_layer_s_nor_what_a_disk_did_not_take(hosts, tmp_path, monkeypatch):
    one, two = hosts
    one.put("x/both", b"1")
    one.local.put("x/local", b"1")
    assert found_by_others(two, ["x/both", "x/local"]) == found_by_others(one, ["x/both", "x/local"]) == {"x/both": b"1"}
    disk = FilesystemStore(tmp_path / "disk")
    disk.put("x/durable", b"1")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_room)
        assert not disk.put("x/kept", b"1")
        assert not disk.put("x/durable", b"2")
    assert disk.get_many(["x/kept", "x/durable"]) == {"x/kept": b"1", "x/durable": b"2"}
    assert found_by_others(disk, ["x/kept", "x/durable"]) == {}, "what lies there is not what was published last"
    assert disk.put("x/kept", b"1")
    assert found_by_others(disk, ["x/kept"]) == {"x/kept": b"1"}
    assert found_by_others(MemoryStore(), ["x/kept"]) == {}


def no_room(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_delete_is_for_this_host_and_the_shared_store(hosts):
    one, two = hosts
    one.put("x/y", b"1")
    two.get("x/y")
    one.delete("x/y")
    assert one.get("x/y") is None
    assert two.shared.get("x/y") is None
    assert two.get("x/y") == b"1"  # as the class says


def test_the_other_hosts_disk_is_not_shared(tmp_path):
    """Two node-local directories taken for a shared one: put is True on both, and neither sees the other's."""
    one, two = FilesystemStore(tmp_path / "one"), FilesystemStore(tmp_path / "two")
    assert one.put("x/y", b"1")
    assert two.get("x/y") is None


def test_without_the_server_the_local_layer_answers_and_nothing_is_durable(tmp_path, caplog):
    with RedisServer() as server:
        url = f"redis://127.0.0.1:{server.port}?timeout=1"
        store = LayeredStore(FilesystemStore(tmp_path), RedisStore.from_url(url, retry_after=timedelta(0)))
        assert store.put("x/y", b"1")
        server.stop()
        assert store.get("x/y") == b"1"
        assert "ConnectionError" in store.degraded
        assert not store.put("x/z", b"2")
        assert store.list("x") == ["x/y", "x/z"]
        assert FilesystemStore(tmp_path).get("x/z") == b"2"
        assert open_store(f"layered:{tmp_path},{url}").get("x/z") == b"2"  # a later process, the server still gone
        server.start()
        assert store.put("x/z", b"3")
        assert store.degraded is None
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2  # one a handle


def test_a_local_disk_that_takes_nothing_hurts_nobody(server, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    store = open_store(f"layered:{tmp_path}/file,redis://127.0.0.1:{server.port}?timeout=20")
    assert store.put("x/y", b"1")
    assert store.get("x/y") == b"1"
    assert store.degraded is None
    assert [str(tmp_path / "file") in record.getMessage() for record in caplog.records] == [True]


def test_urls_and_journal(tmp_path, server):
    store = open_store(f"layered:{tmp_path},redis://u:secret@127.0.0.1:{server.port}")
    assert store.url == f"layered:file://{tmp_path},redis://127.0.0.1:{server.port}/0"
    assert "secret" not in repr(store) + repr(ReadOnlyStore(store))
    assert store.journal_folder == FilesystemStore(tmp_path).journal_folder
    assert LayeredStore(MemoryStore(), MemoryStore()).journal_folder is None
    with pytest.raises(StoreError, match="a layered store needs two"):
        open_store("layered:/only/one")


def test_a_read_only_store_sends_no_write(server):
    url = f"redis://127.0.0.1:{server.port}?timeout=20"
    open_store(url).put("x/y", b"1")
    with server.client() as client:
        client.config_resetstat()
        store = open_store(f"read-only:{url}")
        assert store.get("x/y") == b"1"
        assert not store.put("x/y", b"2")
        assert not store.put("x/z", b"3")
        store.delete("x/y")
        assert store.get("x/y") is None
        assert store.list("x") == ["x/z"]
        assert store.url == f"read-only:redis://127.0.0.1:{server.port}/0"
        assert {"cmdstat_set", "cmdstat_del"}.isdisjoint(client.info("commandstats"))
    assert open_store(url).get("x/y") == b"1"


@pytest.mark.parametrize("layers", ["layered:{disk}/local,{url}", "layered:{disk}/nearer,layered:{disk}/local,{url}"])
def test_a_read_only_layered_store_writes_no_layer(layers, server, tmp_path):
    """What it reads from the shared layer would be kept locally; a store that is never written keeps it in memory."""
    url = f"redis://127.0.0.1:{server.port}?timeout=20"
    open_store(url).put("x/shared", b"1")
    open_store(str(tmp_path / "local")).put("x/local", b"2")
    files = sorted(tmp_path.rglob("*"))
    with server.client() as client:
        client.config_resetstat()
        store = open_store("read-only:" + layers.format(disk=tmp_path, url=url))
        assert store.get_many(["x/shared", "x/local"]) == {"x/shared": b"1", "x/local": b"2"}
        assert not store.put("x/new", b"3")
        store.delete("x/local")
        assert store.list("x") == ["x/new", "x/shared"]
        assert {"cmdstat_set", "cmdstat_del"}.isdisjoint(client.info("commandstats"))
    assert sorted(tmp_path.rglob("*")) == files
    assert open_store(store.url).get("x/local") == b"2"  # what it calls itself opens it again


def test_layers_made_by_hand_are_not_written_below_a_read_only_store_and_the_local_one_is_over_one(tmp_path):
    shared = FilesystemStore(tmp_path / "shared")
    shared.put("x/y", b"1")

    def layers(name, far=shared):
        return LayeredStore(FilesystemStore(tmp_path / name), far)

    for store in (
        ReadOnlyStore(layers("a")),
        ReadOnlyStore(LayeredStore(layers("b"), layers("c"))),
        ReadOnlyStore(ReadOnlyStore(layers("d"))),
    ):
        assert store.get("x/y") == b"1"
        assert store.list("x") == ["x/y"]
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]
    over = layers("e", ReadOnlyStore(shared))
    assert over.get("x/y") == b"1"
    assert not over.put("x/z", b"2")
    assert FilesystemStore(tmp_path / "e").list("") == ["x/y", "x/z"]
    assert shared.list("") == ["x/y"]
