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
from moe_dist.stores.redis import TWO_STORES, RedisStore

FORMS = (
    "memory:",
    "file:///path",
    "a plain path",
    *(f"{scheme}://" for scheme in REDIS_SCHEMES),
    "layered:LOCAL,SHARED",
    "read-only:STORE",
)


def open_store(url: str, *, upkeep: bool = True) -> Store:
    """The store that `url` names. StoreError: the URL can't be understood; a disk or server that is gone is no error here.

    upkeep: False: for who only looks: what dead writers left stays, and nothing that is read is kept in a local layer.
    """
    scheme, colon, rest = url.partition(":")
    if not url:
        raise StoreError(f"the store URL is empty; use one of {', '.join(FORMS)}")
    plain = not colon or "/" in scheme
    if "," in scheme or ("," in url and (plain or scheme in ("file", "memory"))):
        first = url.partition(",")[0]  # what follows may hold a login, and a piece of a password stand where a path would
        shown = f" '{first},...'" if re.fullmatch("([~./]|file:|memory:)[A-Za-z0-9._~/ -]*", first) else ""
        raise StoreError(f"store{shown} has a comma; {TWO_STORES}; in the name of a folder write it %2C: file:///tmp/a%2Cb")
    if plain:
        return FilesystemStore(url, sweep=upkeep)
    if url == "memory:":
        return MemoryStore()
    if scheme == "file":
        parts = urllib.parse.urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise StoreError("a store URL that begins with file: names no local path; write file:///absolute/path")
        return FilesystemStore(urllib.parse.unquote(parts.path), sweep=upkeep)
    if scheme in REDIS_SCHEMES and rest.startswith("//"):
        return RedisStore.from_url(url)
    if scheme == "read-only":
        return ReadOnlyStore(open_store(rest, upkeep=False))
    if scheme == "layered":
        local, comma, shared = rest.partition(",")
        if not comma:
            raise StoreError("a layered store needs two, the local one first: layered:/local/directory,redis://host:6379/0")
        return LayeredStore(open_store(local, upkeep=upkeep), open_store(shared, upkeep=upkeep), keeps=upkeep)
    if scheme in REDIS_SCHEMES:
        raise StoreError(f"a store URL that begins with {scheme}: has two slashes after it: {scheme}://host:6379")
    # Else it may be a piece of a password with a comma.
    shown = repr(scheme + colon) if re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme) and rest.startswith("//") else "'...'"
    raise StoreError(f"store scheme {shown} is unknown; use one of {', '.join(FORMS)}")
