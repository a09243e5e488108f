"""Stores made of stores: a local one over a shared one, and one that is never written.

Owns no medium and no degradation of its own: each layer keeps the contract by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from moe_dist.stores.base import Store, check_key, check_value, reporting
from moe_dist.stores.degrade import DegradingStore, Kept


class LayeredStore:
    """A local store (a directory of this host) over a shared one (Redis, a directory that all hosts mount).

    The shared one is asked first and what it has is kept locally; the local one answers what the shared one has not, or can't
    say because it is gone, was emptied or has expired it. `put` is True when the shared one took it. `delete` removes from both,
    but not from what other hosts keep locally: there the value may still be found. That is harmless to agreement: a plan takes
    bytes that all ranks were shown, wherever one rank had them from. keeps: False: what is only read is not kept locally.
    Over a `ReadOnlyStore` the local layer is written alone; a `ReadOnlyStore` over layers writes none.
    """

    def __init__(self, local: Store, shared: Store, *, keeps: bool = True) -> None:
        self.local = local
        self.shared = shared
        self._keeps = keeps

    @property
    def url(self) -> str:
        return f"layered:{self.local.url},{self.shared.url}"

    @property
    def degraded(self) -> str | None:
        return self.shared.degraded

    @property
    def journal_folder(self) -> str | None:
        """The local layer's, where it has one: crashes are a matter of this host."""
        return getattr(self.local, "journal_folder", None)

    def get(self, key: str) -> bytes | None:
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        shared = self.shared.get_many(wanted)
        local = self.local.get_many(wanted)
        for key, value in shared.items():
            if self._keeps and local.get(key) != value:
                self.local.put(key, value)
        return local | shared

    def put(self, key: str, value: bytes) -> bool:
        self.local.put(key, value)
        return self.shared.put(key, value)

    def delete(self, key: str) -> None:
        self.shared.delete(key)
        self.local.delete(key)

    def list(self, prefix: str) -> list[str]:
        return sorted({*self.shared.list(prefix), *self.local.list(prefix)})

    @contextlib.contextmanager
    def reporting(self, progress: Callable[[], None]) -> Iterator[None]:
        """As `degrade.DegradingStore.reporting`, of both layers."""
        with reporting(self.local, progress), reporting(self.shared, progress):
            yield

    def close(self) -> None:
        self.local.close()
        self.shared.close()

    def __repr__(self) -> str:
        return f"LayeredStore({self.local!r}, {self.shared!r})"


def shared_layer(store: Store) -> Store:
    """Where others look for what `store` publishes: the shared layer of a layered one, else itself."""
    return shared_layer(store.shared) if isinstance(store, LayeredStore) else store


def found_by_others(store: Store, keys: Iterable[str]) -> dict[str, bytes]:
    """What others find under `keys`: not what a local layer has alone, nor what a medium that failed has not taken yet."""
    shared = shared_layer(store)
    return shared.get_durable(keys) if isinstance(shared, DegradingStore) else shared.get_many(keys)


def _only_read(store: Store) -> Store:
    """`store` as who writes nothing reads it: of layers, no local one keeps what the shared one has."""
    return LayeredStore(_only_read(store.local), _only_read(store.shared), keeps=False) if isinstance(store, LayeredStore) else store


class ReadOnlyStore:
    """Reads a store and never writes it, nor a layer of it; what is put or deleted is so for this process alone, and `put` is False."""

    def __init__(self, store: Store) -> None:
        self.store = _only_read(store)
        self._kept = Kept()

    @property
    def url(self) -> str:
        return f"read-only:{self.store.url}"

    @property
    def degraded(self) -> str | None:
        return self.store.degraded

    def get(self, key: str) -> bytes | None:
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        return self._kept.over(self.store.get_many(wanted), wanted)

    def put(self, key: str, value: bytes) -> bool:
        self._kept.values[check_key(key)] = bytes(check_value(value))
        return False

    def delete(self, key: str) -> None:
        self._kept.values[check_key(key)] = None

    def list(self, prefix: str) -> list[str]:
        return self._kept.over_listing(self.store.list(prefix), prefix)

    def reporting(self, progress: Callable[[], None]) -> AbstractContextManager[None]:
        return reporting(self.store, progress)

    def close(self) -> None:
        self.store.close()

    def __repr__(self) -> str:
        return f"ReadOnlyStore({self.store!r})"
