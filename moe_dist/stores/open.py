"""From a URL to a store. The tuner's callers, the command line and the plugins open stores here and nowhere else."""

from __future__ import annotations

import re
import urllib.parse

from moe_dist.errors import StoreError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore, ReadOnlyStore
from moe_dist.stores.memory import MemoryStore
from moe_dist.stores.redis import SCHEMES as REDIS_SCHEMES
from moe_dist.stores.redis import RedisStore

FORMS = (
    "memory:",
    "file:///path",
    "a plain path",
    *(f"{scheme}://" for scheme in REDIS_SCHEMES),
    "layered:LOCAL,SHARED",
    "read-only:STORE",
)


def open_store(url: str) -> Store:
    """The store that `url` names. StoreError: the URL can't be understood; a disk or server that is gone is no error here."""
    return _open(url, writes=True)


def _open(url: str, *, writes: bool) -> Store:
    """writes: False below read-only, where not even what dead writers left is removed."""
    scheme, colon, rest = url.partition(":")
    if not url:
        raise StoreError(f"the store URL is empty; use one of {', '.join(FORMS)}")
    if not colon or "/" in scheme:
        return FilesystemStore(url, sweep=writes)
    if url == "memory:":
        return MemoryStore()
    if scheme == "file":
        parts = urllib.parse.urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise StoreError("a store URL that begins with file: names no local path; write file:///absolute/path")
        return FilesystemStore(urllib.parse.unquote(parts.path), sweep=writes)
    if scheme in REDIS_SCHEMES and rest.startswith("//"):
        return RedisStore.from_url(url)
    if scheme == "read-only":
        return ReadOnlyStore(_open(rest, writes=False))
    if scheme == "layered":
        local, comma, shared = rest.partition(",")
        if not comma:
            raise StoreError("a layered store needs two, the local one first: layered:/local/directory,redis://host:6379/0")
        return LayeredStore(_open(local, writes=writes), _open(shared, writes=writes))
    shown = repr(scheme + colon) if re.fullmatch("[A-Za-z+.-]+", scheme) else "'...'"  # else it may be a piece of a password with a comma
    raise StoreError(f"store scheme {shown} is unknown; use one of {', '.join(FORMS)}")
