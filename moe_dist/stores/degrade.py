"""A store over a medium that can fail: the promise of `base.Store` that no caller is hurt by a disk or a server, kept once.

Owns what is kept in memory when a write fails, the one warning, and the pause between attempts. A medium (`filesystem.py`,
`redis.py`) implements four methods that raise `Unavailable`. `layered.ReadOnlyStore` reuses what is kept.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import TypeVar

from moe_dist.stores.base import check_key, check_value

log = logging.getLogger("moe_dist.stores")


class Unavailable(Exception):
    """The medium can't do this now; the message says why, without secrets. rest: nor can it do anything else."""

    def __init__(self, reason: str, *, rest: bool = False) -> None:
        super().__init__(reason)
        self.rest = rest


_T = TypeVar("_T")


class Kept:
    """What this process wrote and its medium did not take: values, and None where it deleted."""

    def __init__(self) -> None:
        self.values: dict[str, bytes | None] = {}

    def over(self, found: dict[str, bytes], keys: Iterable[str]) -> dict[str, bytes]:
        """`found` on the medium, as this process must see it."""
        if not self.values:
            return found
        seen = {key: self.values.get(key, found.get(key)) for key in keys}
        return {key: value for key, value in seen.items() if value is not None}

    def over_listing(self, listed: Iterable[str], prefix: str) -> list[str]:
        """`listed` on the medium under `prefix`, as this process must see it, sorted."""
        start = prefix + "/" if prefix else ""
        seen = {key for key in listed if self.values.get(key, b"") is not None}
        return sorted(seen | {key for key, value in self.values.items() if value is not None and key.startswith(start)})


class DegradingStore(abc.ABC):
    """Implements the contract over a medium. retry_after: how long a medium that can't be reached is left alone."""

    def __init__(self, url: str, *, retry_after: timedelta = timedelta(0)) -> None:
        self.url = url
        self.degraded: str | None = None
        self._kept = Kept()
        self._retry_after_s = retry_after.total_seconds()
        self._down_until_s = 0.0
        self._warned = False

    @abc.abstractmethod
    def _read(self, keys: list[str]) -> dict[str, bytes]: ...

    @abc.abstractmethod
    def _write(self, key: str, value: bytes) -> None:
        """Return only when the value is durable."""

    @abc.abstractmethod
    def _remove(self, key: str) -> None: ...

    @abc.abstractmethod
    def _scan(self, prefix: str) -> Collection[str]: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def get(self, key: str) -> bytes | None:
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(dict.fromkeys(map(check_key, keys)))
        _, found = self._reach(lambda: self._read(wanted))
        return self._kept.over(found or {}, wanted)

    def get_durable(self, keys: Iterable[str]) -> dict[str, bytes]:
        """As `get_many`, without what the medium did not take from this process: what nobody else can find."""
        return {key: value for key, value in self.get_many(keys).items() if key not in self._kept.values}

    def put(self, key: str, value: bytes) -> bool:
        check_key(key)
        check_value(value)
        durable, _ = self._reach(lambda: self._write(key, value))
        self._keep(key, bytes(value), durable)
        return durable

    def delete(self, key: str) -> None:
        check_key(key)
        done, _ = self._reach(lambda: self._remove(key))
        self._keep(key, None, done)

    def list(self, prefix: str) -> list[str]:
        if prefix:
            check_key(prefix)
        _, listed = self._reach(lambda: self._scan(prefix))
        return self._kept.over_listing(listed or [], prefix)

    def _keep(self, key: str, value: bytes | None, done: bool) -> None:
        if done:
            self._kept.values.pop(key, None)
        else:
            self._kept.values[key] = value

    def _reach(self, action: Callable[[], _T]) -> tuple[bool, _T | None]:
        """(True, what `action` returns), or (False, None) where the medium can't, after noting why."""
        if time.monotonic() < self._down_until_s:
            return False, None
        self.degraded = None
        try:
            return True, action()
        except Unavailable as error:
            if error.rest:
                self._down_until_s = time.monotonic() + self._retry_after_s
            self._note(str(error))
            return False, None

    def _note(self, reason: str) -> None:
        """Remember that the medium failed; warn the first time."""
        self.degraded = reason
        if not self._warned:
            self._warned = True
            log.warning("store %s: %s. Going on in memory: what it does not take is lost when this process ends.", self.url, reason)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
