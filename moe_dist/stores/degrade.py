"""A store over a medium that can fail: the promise of `base.Store` that no caller is hurt by a disk or a server, kept once.

Owns what is kept in memory when a write fails, the one warning, the pause between attempts and the word that a call goes on. A
medium (`filesystem.py`, `redis.py`) implements four methods that raise `Unavailable`. `layered.ReadOnlyStore` reuses what is kept.

What a medium did not take is seen by this process until the medium takes it or has something newer. A value that another writer
has put meanwhile is newer, and stands: one that is there now, and is not the one that this process saw there last. All else is
written once the medium answers again, so that others find it, too: an epoch that could not be published admits joiners then.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from moe_dist.stores.base import check_key, check_value

log = logging.getLogger("moe_dist.stores")

_GONE = object()
_CATCH_UP_S = 1.0  # of one call, spent on writing what was kept: the rest goes with the next


class Unavailable(Exception):
    """The medium can't do this now; the message says why, without secrets. rest: nor can it do anything else."""

    def __init__(self, reason: str, *, rest: bool = False) -> None:
        super().__init__(reason)
        self.rest = rest


_T = TypeVar("_T")
_CHANCE = random.SystemRandom()  # no seed that ranks share, and none that a user's draws depend on


def spread(seconds: float) -> float:
    """About `seconds`, so that ranks which lost a server in one moment do not come back in one."""
    return seconds * _CHANCE.uniform(0.75, 1.25)


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
        kept = dict(self.values)
        seen = {key for key in listed if kept.get(key, b"") is not None}
        return sorted(seen | {key for key, value in kept.items() if value is not None and key.startswith(start)})


class DegradingStore(abc.ABC):
    """Implements the contract over a medium. retry_after: about how long a medium that can't be reached is left alone, and how long one
    that refuses writes is not asked to take what was kept."""

    def __init__(self, url: str, *, retry_after: timedelta) -> None:
        self.url = url
        self.degraded: str | None = None
        self._kept = Kept()
        self._seen: dict[str, int] = {}  # of each key that this process knows of, the hash of what it last saw on the medium
        self._retry_after_s = retry_after.total_seconds()
        self._down_until_s = self._refuses_until_s = 0.0
        self._refused: dict[str, float] = {}  # of each key that was kept and refused again, until when it is let be
        self._warned = False
        self._reports: dict[int, Callable[[], None]] = {}  # by thread

    @contextlib.contextmanager
    def reporting(self, progress: Callable[[], None]) -> Iterator[None]:
        """Inside, calls by this thread call `progress` each time that the medium has answered, or has kept them waiting for a timeout."""
        thread = threading.get_ident()
        outer = self._reports.get(thread)
        self._reports[thread] = progress
        try:
            yield
        finally:
            if outer is None:
                del self._reports[thread]
            else:
                self._reports[thread] = outer

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
        self._catch_up()
        reached, found = self._reach(lambda: self._read(wanted))
        if reached:
            self._saw(found or {})
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
        self._catch_up()
        _, listed = self._reach(lambda: self._scan(prefix))
        return self._kept.over_listing(listed or [], prefix)

    def _keep(self, key: str, value: bytes | None, done: bool) -> None:
        if done:
            self._took(key, value)
            self._refuses_until_s = 0.0
            self._catch_up()
            return
        if key not in self._seen and not self._resting():  # it may be read: what it holds now is older than `value`
            self._quietly(lambda: self._saw(self._read([key])))
        self._kept.values[key] = value
        self._refuses_until_s = time.monotonic() + spread(self._retry_after_s)

    def _took(self, key: str, value: bytes | None) -> None:
        self._kept.values.pop(key, None)
        if value is not None:
            self._seen[key] = hash(value)

    def _saw(self, found: dict[str, bytes]) -> None:
        """What the medium holds: where another writer has put it there meanwhile, it stands."""
        for key, value in found.items():
            if self._kept.values and self._seen.get(key) != hash(value):
                self._kept.values.pop(key, None)
            self._seen[key] = hash(value)

    def _catch_up(self) -> None:
        """Write what was kept, where the medium takes it and no other writer has been there."""
        if self._kept.values and not self._resting():
            self._quietly(self._write_kept)

    def _write_kept(self) -> None:
        kept = dict(self._kept.values)
        self._saw(self._read([*kept]))
        until_s = time.monotonic() + _CATCH_UP_S
        self._refused = {key: until for key, until in self._refused.items() if key in kept}
        for key in sorted(kept, key=lambda key: self._refused.get(key, 0.0)):  # what was refused once is behind the others
            value = kept[key]
            if self._kept.values.get(key, _GONE) is not value or self._refused.get(key, 0.0) > time.monotonic():
                continue
            if not self._refuses_until_s <= time.monotonic() < until_s:
                return
            self._report()
            try:
                if value is None:
                    self._remove(key)
                else:
                    self._write(key, value)
            except Unavailable as error:
                now_s = time.monotonic()
                self._refuses_until_s = now_s + spread(self._retry_after_s)
                # The medium was read just now: that it can't be reached may be for this value alone, as one that is too large for a server.
                self._refused[key] = self._refuses_until_s if error.rest else now_s
                raise Unavailable(str(error)) from None
            self._took(key, value)

    def _quietly(self, action: Callable[[], None]) -> None:
        """`action`, which no caller asked for: a medium that refuses it may yet do what was asked for."""
        degraded = self.degraded
        try:
            action()
        except Unavailable as error:
            if error.rest:
                self._failed(error)
                return
        self.degraded = degraded

    def _failed(self, error: Unavailable) -> None:
        if error.rest:
            self._down_until_s = time.monotonic() + spread(self._retry_after_s)
        self._note(str(error))

    def _resting(self) -> bool:
        return time.monotonic() < self._down_until_s

    def _report(self) -> None:
        """The call goes on; whoever waits for this thread may know."""
        if (progress := self._reports.get(threading.get_ident())) is not None:
            progress()

    def _reach(self, action: Callable[[], _T]) -> tuple[bool, _T | None]:
        """(True, what `action` returns), or (False, None) where the medium can't, after noting why."""
        if self._resting():
            return False, None
        self.degraded = None
        try:
            self._report()
            return True, action()
        except Unavailable as error:
            self._failed(error)
            return False, None

    def _note(self, reason: str) -> None:
        """Remember that the medium failed; warn the first time."""
        self.degraded = reason = "".join(
            letter if letter.isprintable() else "?" for letter in reason.rstrip(". ")
        )  # a line, whatever a path has
        if not self._warned:
            self._warned = True
            log.warning("store %s: %s. Going on in memory: what it does not take before this process ends is lost.", self.url, reason)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
