"""From a URL to a store. The tuner's callers, the command line and the plugins open stores here and nowhere else."""

from __future__ import annotations

import urllib.parse

from moe_dist.errors import StoreError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.memory import MemoryStore

SCHEMES = ("memory:", "file:///path", "a plain path")


def open_store(url: str) -> Store:
    """The store that `url` names. StoreError: the URL can't be understood; a disk or server that is gone is no error here."""
    scheme, colon, _ = url.partition(":")
    if not url:
        raise StoreError(f"the store URL is empty; use one of {', '.join(SCHEMES)}")
    if not colon or "/" in scheme:
        return FilesystemStore(url)
    if url == "memory:":
        return MemoryStore()
    if scheme == "file":
        parts = urllib.parse.urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise StoreError(f"store URL {url!r} names no local path; write file:///absolute/path")
        return FilesystemStore(urllib.parse.unquote(parts.path))
    raise StoreError(f"store scheme {scheme + colon!r} is unknown; use one of {', '.join(SCHEMES)}")
