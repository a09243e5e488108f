"""Where committed epochs live in a store, so that a joiner or a replica can adopt one without a step on serving ranks; and how what
one rank's store holds gets to all ranks of its group.

Knows keys and bytes; what an epoch's value says is the codec's business. A value is published only after its pass was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgpack

from moe_dist.distributed.group import RankGroup
from moe_dist.tuning.problem import digest

T = TypeVar("T")
EPOCHS = "epochs"


class ByteStore(Protocol):
    """The part of a store that epochs need."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> bool: ...
    def list(self, prefix: str) -> list[str]: ...


def spread(group: RankGroup, store: ByteStore, key: str, value: bytes, *, held: bool) -> tuple[bytes, list[int]]:
    """The leader's `value` on every rank: each looks under `key` in its own store, and who does not find it there gets it from the leader.

    key, value, held: the leader's; held: its store has published the value. Returns the value, and the global ranks that did not find it.
    """
    key, wanted, held = msgpack.unpackb(group.exchange("spread-key", msgpack.packb([key, digest(value), held]))[0])
    seen = value if group.is_leader else store.get(key) if held else None
    found = seen is not None and digest(seen) == wanted
    answers = group.exchange("spread-found", b"yes" if found else b"")
    strangers = [rank for rank, answer in enumerate(answers) if not answer]
    sent = group.exchange("spread-value", value if group.is_leader else b"", reads=() if found else (0,))[0] if strangers else b""
    return (seen if seen is not None and found else sent), [group.names[rank] for rank in strangers]


def folder(deployment: str) -> str:
    return f"{EPOCHS}/{digest(deployment)}"


def publish(store: ByteStore, deployment: str, number: int, value: bytes) -> bool:
    """Make a committed epoch visible to joiners. False: it could not be published; until it is, nobody can join from here."""
    return store.put(f"{folder(deployment)}/{number:08d}", value)


def newest(store: ByteStore, deployment: str, decode: Callable[[bytes], T | None]) -> T | None:
    """The highest-numbered epoch of `deployment` that decodes; None: there is none."""
    for key in reversed(store.list(folder(deployment))):
        value = store.get(key)
        decoded = decode(value) if value is not None else None
        if decoded is not None:
            return decoded
    return None


def newest_number(store: ByteStore, deployment: str) -> int:
    """The highest number published for `deployment`, readable or not; 0: none."""
    numbers = [int(tail) for key in store.list(folder(deployment)) if (tail := key.rpartition("/")[2]).isdigit()]
    return max(numbers, default=0)
