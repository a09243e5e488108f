"""Where epochs lie in a store, and how what the leader's store holds gets to all ranks, whether their stores are one or not."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed import epoch
from moe_dist.distributed.epoch import EpochName, HostCopy, Publications, folder, publish, published, spread
from moe_dist.distributed.group import RankGroup
from moe_dist.stores.base import MAX_VALUE_BYTES
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning.problem import Epoch, digest

VALUE = b"table" * 100  # long enough to be sent apart from the words


def on_ranks(stores: list[MemoryStore], action: Callable[[RankGroup, MemoryStore], Any]) -> list[Any]:
    rendezvous = HashStore()
    deadlines = {"progress_timeout": timedelta(seconds=5), "cap": timedelta(seconds=20)}
    groups = [RankGroup(rendezvous, rank, len(stores), names=[10 + rank for rank in range(len(stores))], **deadlines)
              for rank in range(len(stores))]  # fmt: skip
    for group in groups:
        group.begin_pass()
    with ThreadPoolExecutor(len(stores)) as pool:
        futures = [pool.submit(action, group, store) for group, store in zip(groups, stores, strict=True)]
        got = [future.result(20) for future in futures]
    for group in groups:
        group.close()
    return got


class CountingStore(MemoryStore):
    """One of another URL is another store, as on another host."""

    def __init__(self, url: str = "test:") -> None:
        super().__init__()
        self.url, self.reads = url, 0

    def get(self, key: str) -> bytes | None:
        self.reads += 1
        return super().get(key)


def stored(value: bytes = VALUE, url: str = "test:") -> CountingStore:
    store = CountingStore(url)
    store.put("at/key", value)
    return store


def from_the_leader(group: RankGroup, store: MemoryStore) -> tuple[bytes, list[int]]:
    leads = group.is_leader
    return spread(group, store, "at/key" if leads else "", VALUE if leads else b"", held=leads)


def test_ranks_that_share_the_store_read_it_there() -> None:
    assert on_ranks([stored()] * 3, from_the_leader) == [(VALUE, [])] * 3


# Nothing there; something else there, as after a pass of another group; a damaged copy.
@pytest.mark.parametrize("other", [MemoryStore(), stored(b"older", "other:"), stored(VALUE[:-1] + b"?", "other:")])
def test_a_rank_that_does_not_find_it_gets_it_from_the_leader_and_is_named(other: MemoryStore) -> None:
    assert on_ranks([stored(), other, stored()], from_the_leader) == [(VALUE, [11])] * 3


def test_what_no_store_took_is_sent_to_all() -> None:
    def unheld(group: RankGroup, store: MemoryStore) -> tuple[bytes, list[int]]:
        return spread(group, store, "at/key", VALUE if group.is_leader else b"", held=False)

    assert on_ranks([stored()] * 2, unheld) == [(VALUE, [11])] * 2, "what lies there was not announced"


def test_a_group_of_one_keeps_what_it_has() -> None:
    group = RankGroup.alone()
    group.begin_pass()
    assert spread(group, MemoryStore(), "at/key", VALUE, held=False) == (VALUE, [])


# -- one reader a host -------------------------------------------------------------------------------------------------------


def copies() -> set[Path]:
    return set(epoch.SHARED_MEMORY.glob(f"moe_dist-{os.getuid()}-*"))


def test_of_the_ranks_of_a_host_one_reads_the_store_and_nothing_stays_behind() -> None:
    store, before = stored(), copies()
    with HostCopy(store, "at/key", digest(VALUE)) as copy:
        assert copy.read() == VALUE
        assert len(copies() - before) == 1
        assert [HostCopy(store, "at/key", digest(VALUE)).read() for _ in range(7)] == [VALUE] * 7
    assert store.reads == 1
    assert copies() == before
    assert on_ranks([stored()] * 9, from_the_leader) == [(VALUE, [])] * 9
    assert copies() == before


# A copy cut short, as by a rank that was killed; another's bytes; more bytes than the value.
@pytest.mark.parametrize("left", [VALUE[:-1], b"foreign" * 100, VALUE + b"?"])
def test_what_is_no_copy_is_read_from_the_store_again(left: bytes) -> None:
    store = stored()
    with HostCopy(store, "at/key", digest(VALUE)) as copy:
        copy.read()
        (path,) = [path for path in copies() if path.read_bytes() == VALUE]
        path.write_bytes(left)
        assert copy.read() == VALUE
        assert path.read_bytes() == VALUE
        assert copy.read() == VALUE
    assert store.reads == 2


def test_a_file_longer_than_any_value_is_not_read_and_no_reload_fails_of_it() -> None:
    """A sparse one takes no memory to leave, and all there is to read."""
    assert epoch._MAX_BYTES == MAX_VALUE_BYTES
    path = HostCopy(stored(), "at/key", digest(VALUE))._path
    with path.open("wb") as left:
        left.truncate(1 << 62)
    assert on_ranks([stored() for _ in range(3)], from_the_leader) == [(VALUE, [])] * 3
    assert not path.exists()


def a_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def a_second_name(path: Path, elsewhere: Path) -> None:
    path.hardlink_to(elsewhere)


def a_pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path, elsewhere: Path) -> None:
    path.mkdir()


# Whoever writes through the first two writes into another file; the others can't be read as a file.
@pytest.mark.parametrize("leave", [a_link, a_second_name, a_pipe, a_folder])
def test_what_lies_there_and_is_no_file_of_its_own_is_neither_read_nor_written(
    leave: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(epoch, "SHARED_MEMORY", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    store = stored()
    with HostCopy(store, "at/key", digest(VALUE)) as copy:
        leave(copy._path, elsewhere)
        assert (copy.read(), copy.read(), store.reads) == (VALUE, VALUE, 2)
    assert elsewhere.read_bytes() == b"precious"


# What another user's file holds: nothing of ours; a right copy, whose owner may still cut it short while it is read.
@pytest.mark.parametrize("left", [b"foreign", VALUE])
def test_another_user_s_file_that_can_not_be_removed_is_left_alone_and_every_reload_works(
    left: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(epoch, "SHARED_MEMORY", tmp_path)
    path = HostCopy(stored(), "at/key", digest(VALUE))._path
    path.write_bytes(left)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    refused = list[Path]()

    def unlink(at: Path) -> None:  # as in a folder with the sticky bit
        refused.append(at)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(epoch, "_locked", lambda handle: pytest.fail("its owner may hold the lock for ever"))
    for _ in range(2):
        stores = [stored() for _ in range(3)]
        assert on_ranks(stores, from_the_leader) == [(VALUE, [])] * 3
        assert [store.reads for store in stores] == [0, 1, 1], "each for itself, the leader has it"
    assert path.read_bytes() == left
    assert refused == [path] * 6


def test_a_store_without_the_value_leaves_no_copy_for_those_that_have_it() -> None:
    with HostCopy(stored(b"older"), "at/key", digest(VALUE)) as copy:
        assert copy.read() is None
        assert HostCopy(stored(), "at/key", digest(VALUE)).read() == VALUE


def test_whoever_waits_too_long_for_another_rank_or_has_no_such_memory_reads_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(epoch, "_PATIENCE_S", 0.05)
    store = stored()
    with HostCopy(store, "at/key", digest(VALUE)) as copy:
        copy.read()
        (path,) = [path for path in copies() if path.read_bytes() == VALUE]
        with path.open() as stopped:
            fcntl.flock(stopped, fcntl.LOCK_EX)
            assert copy.read() == VALUE
    assert store.reads == 2
    monkeypatch.setattr(epoch, "SHARED_MEMORY", tmp_path / "none")
    with HostCopy(store, "at/key", digest(VALUE)) as copy:
        assert (copy.read(), copy.read(), store.reads) == (VALUE, VALUE, 4)


# -- names -------------------------------------------------------------------------------------------------------------------


def test_epochs_are_listed_newest_first_and_what_has_another_name_is_none() -> None:
    store = MemoryStore()
    tables = [Epoch(number, "d") for number in (9, 10, 123456789)]  # beyond eight digits the order of keys is no longer that of numbers
    for table in tables:
        publish(store, table, b"value")
    publish(store, Epoch(11, "other deployment"), b"value")
    for foreign in ("00000012", "notes", "00000013-aa-bb"):
        store.put(f"{folder('d')}/{foreign}", b"value")
    assert [name.number for name in published(store, "d")] == [123456789, 10, 9]
    assert [store.get(name.key("d")) for name in published(store, "d")] == [b"value"] * 3


def test_of_what_a_rank_has_published_the_one_before_stays_for_a_joiner_that_is_about_to_read_it(tmp_path: Path) -> None:
    store, own, left = FilesystemStore(tmp_path), Publications(), []
    for number in (1, 2, 3, 2):  # the last is published anew, as after another job's was adopted in between
        publish(store, Epoch(number, "d"), b"value", own=own)
        left.append([name.number for name in published(store, "d")])
    assert left == [[1], [2, 1], [3, 2], [3, 2]]


def test_a_name_says_number_cells_and_table() -> None:
    table = Epoch(7, "d")
    assert EpochName.of(table).key("d") == f"epochs/{digest('d')}/00000007-{digest([])[:16]}-{table.digest}"


def test_a_name_says_the_environments_as_far_as_a_key_has_room() -> None:
    table, environments = Epoch(7, "d"), [digest(str(number)) for number in range(16)]
    for count in (1, 2, 15):  # all that fit are found again
        store = MemoryStore()
        publish(store, table, b"value", environments[:count])
        (name,) = published(store, "d")
        assert name == EpochName.of(table, environments[:count])
        assert name.environments == tuple(sorted(environment[:8] for environment in environments[:count]))
        assert name.may_serve(environments[:count])
        assert not name.may_serve(environments[: count + 1])
    assert EpochName.of(table, environments).environments == ()
    assert EpochName.of(table, environments).may_serve(environments), "only its value says"
