"""The contract of a store: bytes under keys, and a listing. Stores know bytes and keys, not entries, winners or ranks.

Keys are slash-separated segments of lower-case letters, digits, '.', '_' and '-': they are file names, Redis keys and
log words alike. Combine stores by wrapping (`layered.py`), not by flags; `open.py` turns a URL into a store, `contract.py`
is the suite that every store passes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from moe_dist.errors import StoreError

_SEGMENT = r"[a-z0-9][a-z0-9._-]{0,199}"  # with a suffix still a file name of at most 255 bytes
SEGMENT = re.compile(_SEGMENT)
KEY = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")
MAX_KEY_CHARS = 512
MAX_VALUE_BYTES = 64 << 20


@runtime_checkable
class Store(Protocol):
    """Bytes under keys, published whole or not at all, visible to everyone who opens the same URL.

    No method raises for a disk or server that is gone, full or read-only: a read is then a miss, a write returns
    False, what was written stays readable in this process, and one warning names the path or host. It is written once the medium
    takes writes again, unless another writer has put a newer value there: then that one is read. Every wait for a server is
    bounded. StoreError: a key is no key, or a value is larger than MAX_VALUE_BYTES.
    """

    @property
    def url(self) -> str:
        """What this store was opened from, without secrets: fit for logs and errors."""

    @property
    def degraded(self) -> str | None:
        """Why the last call did not reach the medium (a miss may then be none); None: it did."""

    def get(self, key: str) -> bytes | None:
        """The value last published under `key`, whole; None when there is none."""

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Those of `keys` that exist, in one trip where the medium allows it."""

    def put(self, key: str, value: bytes) -> bool:
        """Publish atomically: a reader sees the old value or the new, never a part. True: a reader of the same URL sees it
        from now on, also after this process dies."""

    def delete(self, key: str) -> None:
        """Remove; no error when there is nothing."""

    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix` + "/", sorted; every key for ""."""

    def close(self) -> None:
        """Release connections and files; idempotent."""


@runtime_checkable
class Reporting(Protocol):
    """A store whose calls may take long, and which says when they go on."""

    def reporting(self, progress: Callable[[], None]) -> AbstractContextManager[None]: ...


def reporting(store: Store, progress: Callable[[], None]) -> AbstractContextManager[None]:
    """Inside, this thread's calls of `store` call `progress` as they go on, where the store can: a listing of a large database
    may take longer than a rank is waited for that shows no progress."""
    return store.reporting(progress) if isinstance(store, Reporting) else contextlib.nullcontext()


def check_key(key: str) -> str:
    """StoreError: `key` is no store key."""
    if len(key) > MAX_KEY_CHARS or not KEY.fullmatch(key):
        raise StoreError(
            f"{key[:MAX_KEY_CHARS]!r} is no store key: use segments of a-z, 0-9, '.', '_', '-' joined by '/', "
            f"at most 200 characters each and {MAX_KEY_CHARS} in all"
        )
    return key


def check_value(value: bytes) -> bytes:
    """StoreError: `value` is too large for a store."""
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(f"a value of {len(value)} bytes; a store takes at most {MAX_VALUE_BYTES}")
    return value
