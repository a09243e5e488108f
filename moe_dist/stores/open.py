"""From a URL to a store. The tuner's callers, the command line and the plugins open stores here and nowhere else."""

from __future__ import annotations

import contextlib
import re
import urllib.parse

from moe_dist.errors import StoreError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.layered import LayeredStore, ReadOnlyStore
from moe_dist.stores.memory import MemoryStore
from moe_dist.stores.redis import RedisStore
from moe_dist.stores.redis_url import HIDDEN, TWO_STORES
from moe_dist.stores.redis_url import SCHEMES as REDIS_SCHEMES

FORMS = (
    "memory:",
    "file:///path",
    "a plain path",
    *(f"{scheme}://" for scheme in REDIS_SCHEMES),
    "layered:LOCAL,SHARED",
    "read-only:STORE",
)
_SERVER = re.compile(f"(?:read-only:)*(?:{'|'.join(map(re.escape, REDIS_SCHEMES))})://")
# No path of a folder, but a server's URL without its scheme or colon: with a login, or with two slashes after a scheme or nothing.
_LOGIN = re.compile(f".*:.*@|//.*[:@]|(?:{'|'.join(map(re.escape, REDIS_SCHEMES))})//", re.DOTALL)


def open_store(url: str, *, upkeep: bool = True) -> Store:
    """The store that `url` names. StoreError: the URL can't be understood; a disk or server that is gone is no error here.

    upkeep: False: for who only looks: what dead writers left stays, and nothing that is read is kept in a local layer.
    """
    scheme, colon, rest = url.partition(":")
    if not url.strip():
        raise StoreError(f"the store URL is empty; use one of {', '.join(FORMS)}")
    plain = not colon or "/" in scheme
    if "," in scheme or ("," in url and (plain or scheme in ("file", "memory"))):  # not shown: a piece of a password may stand here
        raise StoreError(f"a store's URL has a comma; {TWO_STORES}; in the name of a folder write it %2C: file:///tmp/a%2Cb")
    if plain:
        return _folder(url, url, upkeep)
    if url == "memory:":
        return MemoryStore()
    if scheme == "file":
        host, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest.removeprefix("/"))
        if host not in ("", "localhost") or not (slash or rest.startswith("/")):
            raise StoreError("a store URL that begins with file: names no local path; write file:///absolute/path")
        if "?" in path or "#" in path:
            raise StoreError("a store URL that begins with file: has a '?' or '#'; in the name of a folder write it %3F or %23")
        return _folder("/" + urllib.parse.unquote(path), path, upkeep)
    if scheme in REDIS_SCHEMES and rest.startswith("//"):
        return RedisStore.from_url(url)
    if scheme == "read-only":
        return ReadOnlyStore(open_store(rest, upkeep=False))
    if scheme == "layered":
        local, comma, shared = rest.partition(",")
        if not comma:
            raise StoreError("a layered store needs two, the local one first: layered:/local/directory,redis://host:6379/0")
        if _SERVER.match(local) and "@" in shared and not (_SERVER.match(shared) or shared.startswith("layered:")):
            raise StoreError("layered: a ',' inside a user or password must be written %2C, a '@' in the name of a folder %40")
        return LayeredStore(open_store(local, upkeep=upkeep), open_store(shared, upkeep=upkeep), keeps=upkeep)
    if scheme in REDIS_SCHEMES:
        raise StoreError(f"a store URL that begins with {scheme}: has two slashes after it: {scheme}://host:6379")
    # Else it may be a piece of a password with a comma.
    shown = repr(scheme + colon) if re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme) and rest.startswith("//") else f"'{HIDDEN}'"
    raise StoreError(f"store scheme {shown} is unknown; use one of {', '.join(FORMS)}")


def shown_url(url: str) -> str:
    """`url` for logs and output: a folder as it is written, of a server what may be shown. StoreError: as `open_store`."""
    with contextlib.closing(open_store(url, upkeep=False)) as store:
        return url if isinstance(store, FilesystemStore) else store.url


def _folder(path: str, written: str, upkeep: bool) -> Store:
    """The store in folder `path`, as `written` in the URL."""
    if _LOGIN.match(written):
        raise StoreError(
            "a store's URL looks like that of a server whose scheme was forgotten; write redis://[USER:PASSWORD@]HOST:PORT; "
            "in the name of a folder write ':' as %3A and '@' as %40: file:///tmp/a%3Ab%40c"
        )
    if re.search("[\0\ud800-\udc7f\udd00-\udfff]", path):  # the half characters between are how Python reads a name that is no text
        raise StoreError("a store's URL has a character that no folder has in its name")
    return FilesystemStore(path, sweep=upkeep)
