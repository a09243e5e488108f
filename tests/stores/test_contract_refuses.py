"""The contract suite refuses a store that breaks the contract: each fault here is found by the test that is named beside it."""

from __future__ import annotations

import inspect

import pytest

from moe_dist.stores.contract import StoreContract
from moe_dist.stores.filesystem import FilesystemStore


class LosesWrites(FilesystemStore):
    """Acknowledges every seventh value, and drops it."""

    puts = 0

    def put(self, key, value):
        LosesWrites.puts += 1
        return True if LosesWrites.puts % 7 == 0 else super().put(key, value)


class TearsValues(FilesystemStore):
    """A reader may meet the first half of a long value before the second."""

    def put(self, key, value):
        half = len(value) // 2
        return (half < 1000 or super().put(key, value[:half] + bytes(len(value) - half))) and super().put(key, value)


class RaisesOfTheMedium(FilesystemStore):
    """A key that its medium has no room for is an error of the caller's."""

    def put(self, key, value):
        if len(key) > 255:
            raise OSError("file name too long")
        return super().put(key, value)


class Remembering(FilesystemStore):
    """Answers from what it has seen before, whatever has been written since. Its own changes it knows."""

    def __init__(self, path):
        super().__init__(path)
        self.seen, self.listed = {}, {}

    def put(self, key, value):
        self.seen.pop(key, None)
        self.listed.clear()
        return super().put(key, value)

    def delete(self, key):
        self.seen.pop(key, None)
        self.listed.clear()
        super().delete(key)


class ReadsStaleValues(Remembering):
    def get_many(self, keys):
        found = super().get_many(keys := list(keys))
        self.seen = found | self.seen
        return {key: self.seen[key] for key in keys if key in self.seen}


class RemembersMisses(Remembering):
    def get_many(self, keys):
        found = super().get_many(keys := list(keys))
        self.seen.update({key: None for key in keys if key not in found})
        return {key: value for key, value in found.items() if key not in self.seen}


class ListsWhatItListed(Remembering):
    def list(self, prefix):
        return self.listed.setdefault(prefix, super().list(prefix))


class ListsAPage(FilesystemStore):
    def list(self, prefix):
        return super().list(prefix)[:50]


BROKEN = {
    LosesWrites: "test_writers_side_by_side_lose_nothing",
    TearsValues: "test_a_reader_never_sees_a_part",
    RaisesOfTheMedium: "test_the_longest_key",
    ReadsStaleValues: "test_a_handle_that_has_looked_sees_what_another_changes",
    RemembersMisses: "test_a_handle_that_has_looked_sees_what_another_changes",
    ListsWhatItListed: "test_a_handle_that_has_looked_sees_what_another_changes",
    ListsAPage: "test_writers_side_by_side_lose_nothing",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_store_that_breaks_the_contract_fails_its_suite(broken, tmp_path):
    failed = {}
    for name, test in inspect.getmembers(StoreContract, inspect.isfunction):
        if name.startswith("test_"):
            try:
                test(StoreContract(), lambda name=name: broken(tmp_path / name))
            except (AssertionError, OSError) as error:
                failed[name] = error
    assert BROKEN[broken] in failed
