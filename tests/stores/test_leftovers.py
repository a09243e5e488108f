"""Who only tries a store leaves no folder behind, and takes away none that was there or in which something lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_dist.stores.leftovers import without_new_folders
from moe_dist.stores.open import open_store


def folders(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_dir())


@pytest.mark.parametrize(
    "url", ["{}/a/new", "file://{}/a/new", "layered:{0}/a/new,{0}/a/shared", "read-only:layered:{0}/a/new,{0}/a/shared"]
)
def test_what_a_try_made_is_gone_after_it_with_the_folders_above(url: str, tmp_path: Path) -> None:
    store = open_store(url.format(tmp_path))
    with without_new_folders(store, "bench/1", "epochs/2"):
        for key in ("top", "bench/1/a", "epochs/2/b"):
            store.put(key, b"1")
            store.delete(key)
        assert ("a/new" in folders(tmp_path)) == (not url.startswith("read-only:"))
    assert folders(tmp_path) == []


def test_what_was_there_stays_and_so_does_what_somebody_else_put_there_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "there/epochs").mkdir(parents=True)
    store = open_store(f"{tmp_path}/there")
    with without_new_folders(store, "bench/1", "epochs/2"):
        for key in ("bench/1/a", "epochs/2/b"):
            store.put(key, b"1")
            store.delete(key)
        store.put("bench/another/c", b"1")
    assert folders(tmp_path) == ["there", "there/bench", "there/bench/another", "there/epochs"]
    assert store.list("") == ["bench/another/c"]


def test_a_try_that_ends_early_leaves_no_folder_either(tmp_path: Path) -> None:
    store = open_store(f"{tmp_path}/new")

    def ended() -> None:
        with without_new_folders(store):
            store.put("a", b"1")
            store.delete("a")
            raise SystemExit

    with pytest.raises(SystemExit):
        ended()
    assert folders(tmp_path) == []
    with without_new_folders(store):
        pass  # nothing was made
    assert store.put("a", b"1")
