"""The contract of a store: two byte methods and a listing. Stores know bytes and keys, not entries, winners or ranks.

Keys are slash-separated segments of lower-case letters, digits, '.', '_' and '-': they are file names, Redis keys and
log words alike. Combine stores by wrapping (`layered.py`), not by flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from moe_dist.errors import StoreError

KEY = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")


@runtime_checkable
class Store(Protocol):
    """Bytes under keys, published whole or not at all, visible to everyone who opens the same URL.

    No method raises for a disk or server that is gone, full or read-only: a read is then a miss, a write returns
    False, what was written stays readable in this process, and one warning names the path or host. Every wait is bounded.
    """

    @property
    def url(self) -> str:
        """What this store was opened from, without secrets: fit for logs and errors."""

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
        """Keys that start with `prefix` + "/", sorted."""

    def close(self) -> None:
        """Release connections and files; idempotent."""


def check_key(key: str) -> str:
    """StoreError: `key` is no store key."""
    if not KEY.fullmatch(key):
        raise StoreError(f"{key!r} is no store key: use segments of a-z, 0-9, '.', '_', '-' joined by '/'")
    return key
