"""Folders that a try leaves where a store keeps its files, once the values of the try are gone. Whoever only tries takes them away.

A store itself leaves empty folders alone: another writer may just have made one lasting.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore, ReadOnlyStore


def layers(store: Store) -> list[Store]:
    """The stores that `store` is made of; itself, where it is made of none."""
    if isinstance(store, ReadOnlyStore):
        return layers(store.store)
    return [*layers(store.local), *layers(store.shared)] if isinstance(store, LayeredStore) else [store]


@contextlib.contextmanager
def without_new_folders(store: Store, *prefixes: str) -> Iterator[None]:
    """Of the folders that the block makes for keys below `prefixes` or for the store itself, those that it leaves empty are gone after it.

    A writer that has made one of them meanwhile, and nothing in it, makes it again.
    """
    directories = [layer for layer in layers(store) if isinstance(layer, FilesystemStore)]
    new = {folder for directory in directories for prefix in ("", *prefixes) for folder in directory.missing_folders(prefix)}
    try:
        yield
    finally:
        for folder in sorted(new, key=len, reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
