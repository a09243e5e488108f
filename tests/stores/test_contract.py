"""The contract suite over every store, and a state machine that runs all of them side by side against a dict."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from moe_dist.stores.contract import StoreContract
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore, ReadOnlyStore
from moe_dist.stores.memory import MemoryStore
from moe_dist.stores.redis import RedisStore


def redis_store(server, prefix="moe_dist"):
    return RedisStore.from_url(f"redis://127.0.0.1:{server.port}?prefix={prefix}&timeout=20")


class TestMemory(StoreContract):
    durable = False

    @pytest.fixture
    def opener(self):
        return MemoryStore


class TestFilesystem(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path):
        return lambda: FilesystemStore(tmp_path / "store")


class TestRedis(StoreContract):
    @pytest.fixture
    def opener(self, server):
        return lambda: redis_store(server)


class TestLayered(StoreContract):
    @pytest.fixture
    def opener(self, server, tmp_path):
        return lambda: LayeredStore(FilesystemStore(tmp_path / "store"), redis_store(server))


class TestReadOnly(StoreContract):
    """What a process puts into a read-only store is its own; the layer below stays as it is."""

    durable = False

    @pytest.fixture
    def opener(self, tmp_path):
        yield lambda: ReadOnlyStore(FilesystemStore(tmp_path / "store"))
        assert not (tmp_path / "store").exists()


class TestDegradedFilesystem(StoreContract):
    """A directory that can't be made: the contract holds in memory, but nothing is durable."""

    durable = False

    @pytest.fixture
    def opener(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        return lambda: FilesystemStore(tmp_path / "file" / "store")


# Few keys, so that rules meet; one is the beginning of another, and one begins another's name without being its folder.
NAMES = ["a", "a/b", "a/b/c", "a/bc", "ab", "b/a"]
KEYS = st.sampled_from(NAMES)
PREFIXES = st.sampled_from(["", "a", "a/b", "ab", "c"])
VALUES = st.binary(max_size=20)
CHANGES = st.none() | VALUES  # None: it is deleted
NOBODYS = "c"  # a key that nothing is put under
DISK, SERVER = "disk", "server"


class Refusals:
    """Media that take no writes for a while: `refusing` are DISK and SERVER or not."""

    def __init__(self, server, monkeypatch):
        self.server, self.refusing = server, set()
        fsync = os.fsync

        def sync(handle):
            if DISK in self.refusing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", sync)

    def set(self, *refusing):
        self.refusing = set(refusing)
        with self.server.client() as client:
            client.config_set("maxmemory", 1 if SERVER in refusing else 0)


def machine(server, refusals):
    class SideBySide(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            self.folder = Path(tempfile.mkdtemp())
            refusals.set()
            with server.client() as client:
                client.flushall()
            self.model: dict[str, bytes] = {}
            self.beneath: dict[str, bytes] = {}  # what others have put where the read-only store reads
            self.own: set[str] = set()  # keys that were put into it, or deleted, since it was opened
            self.memory = MemoryStore()
            self.open()

        def open(self):
            self.stores = {
                "memory": self.memory,
                "filesystem": FilesystemStore(self.folder / "filesystem"),
                "redis": redis_store(server, "one"),
                "layered": LayeredStore(FilesystemStore(self.folder / "layered"), redis_store(server, "two")),
                "read-only": ReadOnlyStore(FilesystemStore(self.folder / "read-only")),
            }

        def takes(self, name):
            """What `put` is to say."""
            return {"filesystem": DISK, "redis": SERVER, "layered": SERVER}.get(name, name) not in {
                *refusals.refusing,
                "memory",
                "read-only",
            }

        @rule(key=KEYS, value=VALUES)
        def put(self, key, value):
            self.model[key] = value
            self.own.add(key)
            said = {name: store.put(key, value) for name, store in self.stores.items()}
            assert said == {name: self.takes(name) for name in self.stores}

        @rule(key=KEYS)
        def delete(self, key):
            self.model.pop(key, None)
            self.own.add(key)
            for store in self.stores.values():
                store.delete(key)

        @rule(key=KEYS)
        def get(self, key):
            assert {name: store.get(key) for name, store in self.stores.items()} == dict.fromkeys(self.stores, self.model.get(key))

        @rule(prefix=PREFIXES)
        def list(self, prefix):
            expected = sorted(key for key in self.model if not prefix or key.startswith(prefix + "/"))
            assert {name: store.list(prefix) for name, store in self.stores.items()} == dict.fromkeys(self.stores, expected)

        @rule(key=KEYS, value=VALUES)
        def another_writes_beneath_the_read_only_store(self, key, value):
            assert FilesystemStore(self.folder / "read-only").put(key, value)
            self.beneath[key] = value
            if key not in self.own:
                for name, store in self.stores.items():
                    if name != "read-only":
                        store.put(key, value)
                self.model[key] = value

        @rule()
        def reopen(self):
            """What was put into a read-only store is gone, and is put again."""
            for name, store in self.stores.items():
                if name != "memory":
                    store.close()
            self.open()
            store = self.stores["read-only"]
            assert store.get_many(NAMES) == self.beneath
            self.own = {key for key in NAMES if self.model.get(key) != self.beneath.get(key)}
            for key in self.own:
                if key in self.model:
                    store.put(key, self.model[key])
                else:
                    store.delete(key)

        @rule(
            media=st.sampled_from([(DISK,), (SERVER,), (DISK, SERVER)]), changes=st.lists(st.tuples(KEYS, CHANGES), min_size=1, max_size=4)
        )
        def take_no_writes_for_a_while(self, media, changes):
            """This process sees them all the same; others find them once the next write is taken."""
            refusals.set(*media)
            for key, value in changes:
                if value is None:
                    self.delete(key)
                else:
                    self.put(key, value)
                self.bulk_reads_agree_and_reach_their_medium()
            self.list("a")
            refusals.set()
            layered = self.stores["layered"]
            others = {
                self.stores["filesystem"]: FilesystemStore(self.folder / "filesystem"),
                self.stores["redis"]: redis_store(server, "one"),
                layered.local: FilesystemStore(self.folder / "layered"),
                layered.shared: redis_store(server, "two"),
            }
            for store, other in others.items():
                until = time.monotonic() + 60
                store.delete(NOBODYS)
                while (found := other.get_many(NAMES)) != store.get_many(NAMES) and time.monotonic() < until:
                    store.delete(NOBODYS)  # a call spends a second on it at most
                assert found == store.get_many(NAMES)
                other.close()

        @rule(name=st.sampled_from(["filesystem", "layered"]))
        def lose_a_disk(self, name):
            """The layered store loses only what the server does not have; what was lost is put again."""
            shutil.rmtree(self.folder / name, ignore_errors=True)
            self.put_again(name, set() if name == "filesystem" else set(self.stores["layered"].shared.list("")))

        @rule()
        def lose_the_server(self):
            """The layered store loses only what its disk does not have; what was lost is put again."""
            with server.client() as client:
                client.flushall()
            self.put_again("redis", set())
            self.put_again("layered", set(self.stores["layered"].local.list("")))

        def put_again(self, name, left):
            for key, value in self.model.items():
                assert self.stores[name].get(key) == (value if key in left else None)
                if key not in left:
                    assert self.stores[name].put(key, value)

        @invariant()
        def bulk_reads_agree_and_reach_their_medium(self):
            if hasattr(self, "stores"):
                assert {name: store.get_many(NAMES) for name, store in self.stores.items()} == dict.fromkeys(self.stores, self.model)
                assert {name: store.degraded for name, store in self.stores.items()} == dict.fromkeys(self.stores)

        def teardown(self):
            refusals.set()
            for store in getattr(self, "stores", {}).values():
                store.close()
            if hasattr(self, "folder"):
                assert FilesystemStore(self.folder / "read-only").get_many(NAMES) == self.beneath
                shutil.rmtree(self.folder, ignore_errors=True)

    return SideBySide


@pytest.mark.hypothesis
def test_all_stores_side_by_side(server, monkeypatch):
    refusals = Refusals(server, monkeypatch)
    examples = settings.default.max_examples // 8  # each is twenty steps on five stores
    try:
        run_state_machine_as_test(
            lambda: machine(server, refusals)(), settings=settings(max_examples=examples, stateful_step_count=20)
        )  # fmt: skip
    finally:
        refusals.set()
