"""What a step costs in which one rank is late, for any number of ranks: real groups, in simulated time, before a server that answers
so many requests a second, one after the other. `scaling.py` makes rows of it.

Each rank is a thread, of which one runs at a time: the one whose time comes next.
"""

from __future__ import annotations

import dataclasses
import heapq
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.rendezvous import Rendezvous

T = TypeVar("T")

_STACK_BYTES = 512 << 10  # of a rank's thread: thousands of them have room
_VERSION = "0.10.0+0123abcd"  # part of every key, so that the bytes don't depend on which release counts them, or on how it was installed


@dataclasses.dataclass
class LateStep:
    """requests: of all ranks, looks in vain included. said, read: bytes of values, by rank; names: bytes of the keys that are asked for.
    seconds: from the late rank's word to the end of the last rank's step."""

    requests: int
    said: list[int]
    read: list[int]
    names: int
    seconds: float


def late_step(words: Sequence[bytes], combine: Callable[[list[bytes]], bytes], late_s: float, requests_per_s: float) -> LateStep:
    """The second of two steps in which the ranks say `words`; the last rank comes to it `late_s` after the others."""
    size = len(words)
    time = _Time(size)
    views = [_View(HashStore() if rank == 0 else None, time, rank, 1 / requests_per_s) for rank in range(size)]
    settings: dict[str, Any] = {"version": _VERSION, "progress_timeout": timedelta(hours=1), "cap": timedelta(hours=1)}
    groups = []
    for view in views:
        view.store = views[0].store
        groups.append(_Group(view, view.rank, size, **settings))
    for group in groups:
        group.begin_pass("run_pass")
    ended = [0.0] * size

    def first(rank: int) -> None:
        groups[rank].reduce("start", words[rank], combine)

    def second(rank: int) -> None:
        if rank == size - 1:
            time.sleep(late_s)
        groups[rank].reduce("measure-0-0", words[rank], combine)
        ended[rank] = time.monotonic()

    time.run(first)
    for view in views:
        view.requests = view.said = view.read = view.names = 0
    time.run(second)
    return LateStep(
        sum(view.requests for view in views), [view.said for view in views], [view.read for view in views],
        sum(view.names for view in views), max(ended) - late_s,
    )  # fmt: skip


class _Time:
    """The clock of all ranks: who sleeps lets the others run until then."""

    def __init__(self, size: int) -> None:
        self.now, self.server_free = 0.0, 0.0
        self._due: list[tuple[float, int, int]] = []  # when, in which order asked for, who
        self._asked = 0
        self._go = [threading.Lock() for _ in range(size)]
        self._over = threading.Lock()
        self._here = threading.local()
        self.running = False
        for lock in (*self._go, self._over):
            lock.acquire()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def until(self, when: float) -> None:
        """Go on at `when`, once it is the earliest that anybody waits for."""
        rank = self._here.rank
        self._wait(rank, when)
        if (first := self._next()) != rank:
            self._go[first].release()
            self._go[rank].acquire()

    def run(self, action: Callable[[int], None]) -> None:
        """`action` of every rank, from time 0 to its end."""
        self.now = self.server_free = 0.0
        self.running, failed = True, list[BaseException]()

        def body(rank: int) -> None:
            self._here.rank = rank
            self._go[rank].acquire()
            try:
                action(rank)
            except BaseException as error:
                failed.append(error)
            if self._due:
                self._go[self._next()].release()
            else:
                self._over.release()

        before = threading.stack_size(_STACK_BYTES)
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(self._go))]
        for rank, thread in enumerate(threads):
            self._wait(rank, 0.0)
            thread.start()
        threading.stack_size(before)
        self._go[self._next()].release()
        self._over.acquire()
        for thread in threads:
            thread.join()
        self.running = False
        if failed:
            raise failed[0]

    def _wait(self, rank: int, when: float) -> None:
        self._asked += 1
        heapq.heappush(self._due, (when, self._asked, rank))

    def _next(self) -> int:
        self.now, _, rank = heapq.heappop(self._due)
        return rank


class _View:
    """One rank's requests to the one store: each waits for its turn at the server. Those before the ranks run take no time."""

    def __init__(self, store: Any, time: _Time, rank: int, answer_s: float) -> None:
        self.store, self.time, self.rank, self._answer_s = store, time, rank, answer_s
        self.requests = self.said = self.read = self.names = 0

    def clone(self) -> _View:
        return self

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, keys: Sequence[str], request: Callable[[], T]) -> T:
        if self.time.running:
            self.requests += 1
            self.names += sum(map(len, keys))
            self.time.server_free = max(self.time.server_free, self.time.now) + self._answer_s
            self.time.until(self.time.server_free)
        return request()

    def check(self, keys: list[str]) -> bool:
        return self._ask(keys, lambda: bool(self.store.check(keys)))

    def set(self, key: str, value: str | bytes) -> None:
        self.said += len(value)
        self._ask([key], lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._ask(keys, lambda: self.store.multi_get(keys))
        self.read += sum(map(len, values))
        return values

    def add(self, key: str, amount: int) -> int:
        return self._ask([key], lambda: int(self.store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.said += len(expected) + len(desired)
        value = self._ask([key], lambda: bytes(self.store.compare_set(key, expected, desired)))
        self.read += len(value)
        return value

    def delete_key(self, key: str) -> bool:
        return self._ask([key], lambda: bool(self.store.delete_key(key)))


class _Unthreaded(Rendezvous):
    """Requests are made by the rank's own thread: this server always answers."""

    def __init__(self, store: Any, host: int | None = None) -> None:
        self._store, self._hosts, self.lost = store.clone(), (), False

    def _ask(self, request: Callable[[], T]) -> T:
        return request()

    def close(self) -> None:
        pass


class _Group(RankGroup):
    """A group that waits by the simulated clock."""

    _connect = _Unthreaded

    def __init__(self, view: _View, rank: int, size: int, **deadlines: timedelta) -> None:
        self._clock = view.time
        super().__init__(view, rank, size, **deadlines)  # type: ignore[arg-type]
