"""Requests to a torch.distributed Store, each bounded, over a connection of our own. Knows keys and bytes, no pass and no rank.

A server that stops answering holds neither a rank nor its exit: requests are made by a daemon thread. The first one that fails
ends it all: what is asked afterwards raises at once.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_dist.errors import RendezvousLost, TunerStateError, first_line

T = TypeVar("T")

# How long one request may take before the rendezvous counts as unreachable.
REQUEST_TIMEOUT = timedelta(seconds=15)
KEYS_A_REQUEST = 64  # that are read at once


class Rendezvous:
    """Where ranks leave words for each other. Every method raises RendezvousLost where the store fails or does not answer in time.

    host: the global rank whose process serves the store, for that error; None: it lives outside the ranks.
    """

    def __init__(self, store: Store, host: int | None = None) -> None:
        self._hosts = () if host is None else (host,)
        self._requests = _Requests()
        self.lost = False
        # A connection of our own: the framework may hold the shared one's lock in a long wait. Made as any request is: torch waits without
        # an end for a server that is stopped.
        self._store: Any = self._ask(store.clone)  # type: ignore[attr-defined]

    def holds(self, *keys: str) -> bool:
        """Whether there is a value under every one of `keys`."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are not there, by halves: few requests where few are missing, two for each key at most."""
        if not keys or self.holds(*keys):
            return []
        half = len(keys) // 2
        return self.absent(keys[:half]) + self.absent(keys[half:]) if half else list(keys)

    def get(self, key: str) -> bytes:
        """The value under `key`, which is there."""
        value: Any = self._ask(lambda: self._store.get(key))
        return bytes(value)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, which are there: in few requests where the store can."""
        if not self._store.has_extended_api():
            return [self.get(key) for key in keys]
        parts = [list(keys[at : at + KEYS_A_REQUEST]) for at in range(0, len(keys), KEYS_A_REQUEST)]
        return [bytes(value) for part in parts for value in self._ask(lambda part=part: self._store.multi_get(part))]  # type: ignore[misc]

    def found(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those of `keys` that are there."""
        absent = set(self.absent(keys))
        there = [key for key in keys if key not in absent]
        return dict(zip(there, self.get_many(there), strict=True))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def count(self, key: str) -> int:
        """Add one to the number under `key`, 0 where there is none; what it is then."""
        number: int = self._ask(lambda: self._store.add(key, 1))
        return number

    def settle(self, key: str, value: str, instead_of: str = "") -> str:
        """Compare and set: `value` where `instead_of`, or nothing yet, is under `key`; what it says then."""
        settled: Any = self._ask(lambda: self._store.compare_set(key, instead_of, value))
        return bytes(settled).decode()

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def close(self) -> None:
        """End the thread. A request stuck in a dead server is not waited for."""
        self._requests.close()

    def _ask(self, request: Callable[[], T]) -> T:
        if self.lost:
            raise RendezvousLost("the rendezvous store was lost; the group is dead", self._hosts)
        try:
            return self._requests.call(request, REQUEST_TIMEOUT.total_seconds())
        except (RuntimeError, OSError, ValueError, TimeoutError) as error:
            cause = error
        self.lost = True
        where = f", which rank {self._hosts[0]} serves," if self._hosts else ""
        raise RendezvousLost(
            f"the rendezvous store{where} can't be reached ({first_line(cause)}); treated as aborted, the group is dead", self._hosts
        ) from cause


def store_of(group: dist.ProcessGroup) -> Store:
    """The rendezvous store that `group` was made from, or the default group's."""
    from torch.distributed import distributed_c10d as c10d

    entry = c10d._world.pg_map.get(group)
    if entry is not None and entry[1] is not None:
        return entry[1]
    try:
        return c10d._get_default_store()
    except ValueError as error:
        raise TunerStateError(
            "the group's rendezvous store can't be found: initialise torch.distributed first, or pass a RankGroup"
        ) from error


_Work = queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]


class _Requests:
    """One daemon thread that talks to the rendezvous, so that a server that stops answering can hold neither a rank nor its exit.

    It ends with `close`, and with the group that nobody holds any more: a tuner that outlives its `autotune` block is rarely closed.
    """

    def __init__(self) -> None:
        self._work: _Work = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._work,), name="moe_dist-rendezvous", daemon=True).start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def call(self, request: Callable[[], T], timeout_s: float) -> T:
        """What `request` returns or raises. TimeoutError: it did neither in time."""
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._work.put((request, answer))
        try:
            value, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer in {timeout_s:.0f} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        self._work.put(None)


def _serve(work: _Work) -> None:
    while (item := work.get()) is not None:
        request, answer = item
        try:
            answer.put((request(), None))
        except BaseException as error:  # handed to the caller, whatever it is
            answer.put((None, error))
        del item, request, answer  # the closure holds the group
