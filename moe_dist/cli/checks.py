"""What subcommands refuse before they start, each reason stated once: a file that can't be written, a store that keeps nothing.

Tries and undoes; what may stay is a store's empty folder. The subcommands import this.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

from moe_dist.errors import ConfigError, StoreError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import ReadOnlyStore
from moe_dist.stores.open import open_store


def positive(text: str) -> int:
    """An argument's type: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def require_writable(path: Path | None) -> None:
    """ConfigError: the results of `--json path` could not be written in the end. None: nothing is to be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {str(path)!r} is a folder; name a file")
    if path.exists() and not path.is_file():
        return  # a pipe or a device: whoever reads it must see no try
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    known = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()  # permissions alone don't tell: root may write everywhere, and /proc takes nothing
        if not known:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json {str(path)!r} can't be written: {error.filename!r}: {error.strerror}; name another place") from error
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


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
    """StoreError: `store` is a folder that does not exist, and so was never written."""
    inner = store.store if isinstance(store, ReadOnlyStore) else store
    if isinstance(inner, FilesystemStore) and not inner.exists():
        raise StoreError(f"store {store.url}: there is no such folder; name another with --store; tuning makes it")


def require_reached(store: Store) -> None:
    """StoreError: the last call did not reach the medium of `store`, so that what it returned says nothing."""
    if store.degraded is not None:
        raise StoreError(f"store {store.url} can't be used: {store.degraded}; `moe-dist doctor --store` checks one")


def why_not_kept(url: str) -> str | None:
    """None: the store at `url` took a value, gave it back and removed it; of a read-only one: it can be read. Else the reason.

    StoreError: the URL can't be understood.
    """
    key, value = f"doctor/{uuid.uuid4().hex}", b"moe-dist doctor"
    store = open_store(url)
    try:
        with quiet_stores():
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
