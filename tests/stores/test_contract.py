"""The contract suite over every store, and a state machine that runs all of them side by side against a dict."""

from __future__ import annotations

import shutil
import tempfile
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
KEYS = st.sampled_from(["a", "a/b", "a/b/c", "a/bc", "ab", "b/a"])
PREFIXES = st.sampled_from(["", "a", "a/b", "ab", "c"])
VALUES = st.binary(max_size=20)


def machine(server):
    class SideBySide(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            self.folder = Path(tempfile.mkdtemp())
            with server.client() as client:
                client.flushall()
            self.model: dict[str, bytes] = {}
            self.memory, self.closed = MemoryStore(), 0
            self.open()

        def open(self):
            self.stores = {
                "memory": self.memory,
                "filesystem": FilesystemStore(self.folder / "filesystem"),
                "redis": redis_store(server, "one"),
                "layered": LayeredStore(FilesystemStore(self.folder / "layered"), redis_store(server, "two")),
            }

        @rule(key=KEYS, value=VALUES)
        def put(self, key, value):
            self.model[key] = value
            assert {name: store.put(key, value) for name, store in self.stores.items()} == {name: name != "memory" for name in self.stores}

        @rule(key=KEYS)
        def delete(self, key):
            self.model.pop(key, None)
            for store in self.stores.values():
                store.delete(key)

        @rule(key=KEYS)
        def get(self, key):
            assert {name: store.get(key) for name, store in self.stores.items()} == dict.fromkeys(self.stores, self.model.get(key))

        @rule(prefix=PREFIXES)
        def list(self, prefix):
            expected = sorted(key for key in self.model if not prefix or key.startswith(prefix + "/"))
            assert {name: store.list(prefix) for name, store in self.stores.items()} == dict.fromkeys(self.stores, expected)

        @rule()
        def reopen(self):
            for name, store in self.stores.items():
                if name != "memory":
                    store.close()
            self.open()

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
        def bulk_reads_agree(self):
            if hasattr(self, "stores"):
                keys = ["a", "a/b", "a/b/c", "a/bc", "ab", "b/a"]
                assert {name: store.get_many(keys) for name, store in self.stores.items()} == dict.fromkeys(self.stores, self.model)

        @invariant()
        def all_reach_their_medium(self):
            for store in getattr(self, "stores", {}).values():
                assert store.degraded is None

        def teardown(self):
            for store in getattr(self, "stores", {}).values():
                store.close()
            shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    return SideBySide


@pytest.mark.hypothesis
def test_all_stores_side_by_side(server):
    examples = settings.default.max_examples // 8  # each is twenty steps on four stores
    run_state_machine_as_test(lambda: machine(server)(), settings=settings(max_examples=examples, stateful_step_count=20))
