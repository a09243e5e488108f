"""What subcommands refuse before they start, each reason stated once: a place that can't be written, a store that keeps nothing.

Tries and undoes, folders too. The subcommands import this.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from moe_dist.errors import ConfigError, StoreError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import ReadOnlyStore
from moe_dist.stores.leftovers import layers, without_new_folders
from moe_dist.stores.open import open_store


def positive(text: str) -> int:
    """An argument's type: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def store_url(text: str) -> str:
    """An argument's type: a folder or URL, not the empty one that a variable gives which is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; name a folder or URL, or leave the flag out for the default store")
    return text


def may_hold_login(text: str) -> bool:
    """Whether an argument looks like a store's URL, right or wrong, and so is not to be shown where it does not belong; token counts as
    --buckets takes them do not."""
    return re.search("[:@]|//", text) is not None and not re.fullmatch("[0-9:,]+", text)


def require_writable(path: Path | None) -> None:
    """ConfigError: the results of `--json path` could not be written in the end. None: nothing is to be written."""
    if path is None:
        return
    require_folder_of(path, "--json")
    if path.is_dir():
        raise ConfigError(f"--json {str(path)!r} is a folder; name a file")
    if path.exists() and not path.is_file():
        return  # a pipe or a device: whoever reads it must see no try
    known = path.exists()
    try:
        path.open("ab").close()  # permissions alone don't tell: root may write everywhere, and /proc takes nothing
        if not known:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json {str(path)!r} can't be written: {error.filename!r}: {error.strerror}; name another place") from error


def require_folder_of(path: Path, flag: str) -> None:
    """ConfigError: the folder in which `flag path` would lie is not there. None is made: a name that was mistyped is no wish for one."""
    folder = path.parent
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{flag} {str(path)!r}: the folder {str(folder.absolute())!r} {what}; make it, or name another place")


@contextlib.contextmanager
def quiet_stores() -> Iterator[None]:
    """No store says that it goes on in memory: the caller looks at `degraded` and goes on with nothing."""
    log = logging.getLogger("moe_dist.stores")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def require_there(store: Store) -> None:
    """StoreError: `store` is a folder that does not exist, or layers of such, and so was never written."""
    if not any(_may_hold(layer) for layer in layers(store)):
        raise StoreError(f"store {store.url}: there is no such folder; name another with --store; tuning makes it")


def _may_hold(layer: Store) -> bool:
    return not isinstance(layer, FilesystemStore) or layer.exists()


def require_reached(store: Store) -> None:
    """StoreError: the last call did not reach the medium of `store`, so that what it returned says nothing."""
    if store.degraded is not None:
        raise StoreError(f"store {store.url} can't be used: {store.degraded}; `moe-dist doctor --store` checks one")


def why_not_kept(url: str) -> str | None:
    """None: the store at `url` took a value, gave it back and removed it; of a read-only one: it can be read. Else the reason.

    StoreError: the URL can't be understood.
    """
    key, value = f"doctor-{uuid.uuid4().hex}", b"moe-dist doctor"  # in no folder of its own
    store = open_store(url)
    try:
        with quiet_stores(), without_new_folders(store):
            if isinstance(store, ReadOnlyStore):
                store.get(key)
                return store.degraded
            if not store.put(key, value):
                return store.degraded or "it lasts as long as its process"
            found, reason = store.get(key), store.degraded
            store.delete(key)
        return None if found == value else reason or "what was written is not read back"
    finally:
        store.close()
