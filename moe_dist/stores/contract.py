"""The suite that every store passes, shipped so that others can test theirs.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def opener(self, tmp_path):
            return lambda: MyStore(tmp_path)

`opener()` gives a new handle on the same, at first empty, place. A store that keeps nothing beyond its handle sets
`durable = False`. Run it with pytest; only tests import this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from moe_dist.errors import StoreError
from moe_dist.stores.base import MAX_KEY_CHARS, MAX_VALUE_BYTES, Store

Opener = Callable[[], Store]

WRONG_KEYS = (
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/../b",
    ".hidden",
    "A",
    "a b",
    "a+value",
    "a{b}",
    "a*",
    "é",
    "a\n",
    "x" * 201,
    "a/" * 300 + "a",
)


def refused(call: Callable[[], object], message: str) -> None:
    try:
        call()
    except StoreError as error:
        said = str(error)
    else:
        said = "nothing: it was no error"
    assert message in said, f"{said!r} does not say {message!r}"


class StoreContract:
    durable = True

    def test_it_is_a_store_with_a_url_and_reaches_its_medium(self, opener: Opener) -> None:
        store = opener()
        assert isinstance(store, Store)
        assert store.url
        assert store.url == opener().url
        assert store.get("a/b") is None
        assert store.degraded is None

    def test_nothing_is_found_in_an_empty_store(self, opener: Opener) -> None:
        store = opener()
        assert store.get("a/b") is None
        assert store.get_many(["a/b", "c"]) == {}
        assert store.get_many([]) == {}
        assert store.list("a") == []
        assert store.list("") == []
        store.delete("a/b")

    def test_what_is_put_is_read_back_whole(self, opener: Opener) -> None:
        store = opener()
        values = {"empty": b"", "all-bytes": bytes(range(256)), "a/b/large": bytes(1 << 20)}
        for key, value in values.items():
            assert store.put(key, value) is self.durable
            assert store.get(key) == value
        assert store.get_many([*values, "absent", "empty"]) == values

    def test_the_last_value_stands(self, opener: Opener) -> None:
        store = opener()
        for value in (b"a long first value", b"short", b"a longer third value"):
            store.put("a/b", value)
            assert store.get("a/b") == value
        assert store.list("a") == ["a/b"]

    def test_another_handle_sees_it_at_once_and_after_the_first_is_closed(self, opener: Opener) -> None:
        one, two = opener(), opener()
        assert one.put("a/b", b"1") is self.durable
        assert two.get("a/b") == (b"1" if self.durable else None)
        one.close()
        assert opener().get("a/b") == (b"1" if self.durable else None)
        two.delete("a/b")
        assert opener().get("a/b") is None

    def test_a_handle_that_has_looked_sees_what_another_changes(self, opener: Opener) -> None:
        """What a handle remembers, a value, a miss or a listing, is no answer once another has written."""
        one, two = opener(), opener()
        for value in (None, b"1", b"2", None, b"3"):
            if value is None:
                one.delete("a/b")
            else:
                assert one.put("a/b", value) is self.durable
            there = value if self.durable else None
            assert two.get("a/b") == there
            assert two.get_many(["a/b"]) == ({} if there is None else {"a/b": there})
            for prefix in ("a", ""):
                assert two.list(prefix) == ([] if there is None else ["a/b"])

    def test_a_listing_knows_whole_segments_and_is_sorted(self, opener: Opener) -> None:
        store = opener()
        keys = ["a", "a/b", "a/b/c", "a.b/c", "ab/c", "b/a", "a/b-2/c"]
        for key in keys:  # a key may be the beginning of another
            store.put(key, key.encode())
        assert store.list("") == sorted(keys)
        assert store.list("a") == ["a/b", "a/b-2/c", "a/b/c"]
        assert store.list("a/b") == ["a/b/c"]
        assert store.list("a/b/c") == []
        assert store.get_many(keys) == {key: key.encode() for key in keys}

    def test_delete_takes_one_key_alone(self, opener: Opener) -> None:
        store = opener()
        for key in ("a", "a/b", "a/b/c"):
            store.put(key, b"1")
        store.delete("a/b")
        store.delete("a/b")
        assert store.get("a/b") is None
        assert store.list("") == ["a", "a/b/c"]
        store.put("a/b", b"2")
        assert store.get("a/b") == b"2"

    def test_the_longest_key(self, opener: Opener) -> None:
        store = opener()
        key = "/".join(["x" * 200, "y" * 200, "z" * (MAX_KEY_CHARS - 402)])
        assert store.put(key, b"1") is self.durable
        assert store.list("x" * 200) == [key]
        assert store.get(key) == b"1"

    def test_a_wrong_key_is_refused(self, opener: Opener) -> None:
        store = opener()
        for key in WRONG_KEYS:
            refused(lambda key=key: store.get(key), "is no store key: use segments of")  # type: ignore[misc]
            refused(lambda key=key: store.get_many(["a", key]), "is no store key")  # type: ignore[misc]
            refused(lambda key=key: store.put(key, b""), "is no store key")  # type: ignore[misc]
            refused(lambda key=key: store.delete(key), "is no store key")  # type: ignore[misc]
            if key:
                refused(lambda key=key: store.list(key), "is no store key")  # type: ignore[misc]
        assert store.list("") == []

    def test_a_value_that_is_too_large_is_refused(self, opener: Opener) -> None:
        store = opener()
        refused(lambda: store.put("a", bytes(MAX_VALUE_BYTES + 1)), f"a store takes at most {MAX_VALUE_BYTES}")
        assert store.get("a") is None

    def test_close_twice(self, opener: Opener) -> None:
        store = opener()
        store.put("a", b"1")
        store.close()
        store.close()

    def test_a_reader_never_sees_a_part(self, opener: Opener) -> None:
        """Four threads replace one value by runs of one byte; a fifth reads."""
        shared = opener()
        shared.put("a/b", b"0" * 50_000)
        done = threading.Event()
        seen: set[bytes | None] = set()

        def write(byte: bytes) -> None:
            store = opener() if self.durable else shared
            for _ in range(20):
                store.put("a/b", byte * 50_000)

        def read() -> None:
            store = opener() if self.durable else shared
            while not done.wait(0.0005):
                seen.add(store.get("a/b"))

        writers = [threading.Thread(target=write, args=(byte,)) for byte in (b"1", b"2", b"3", b"4")]
        reader = threading.Thread(target=read)
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        reader.join()
        seen.add(shared.get("a/b"))
        assert seen <= {byte * 50_000 for byte in (b"0", b"1", b"2", b"3", b"4")}

    def test_writers_side_by_side_lose_nothing(self, opener: Opener) -> None:
        shared = opener()

        def write(thread: int) -> None:
            store = opener() if self.durable else shared
            for number in range(25):
                store.put(f"t{thread}/k{number}", f"{thread}.{number}".encode())

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        keys = sorted(f"t{thread}/k{number}" for thread in range(4) for number in range(25))
        assert shared.list("") == keys
        assert len(shared.get_many(keys)) == 100
