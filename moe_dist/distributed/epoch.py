"""Where committed epochs live in a store, so that a joiner or a replica can adopt one without a step on serving ranks.

Knows keys and bytes; what an epoch's value says is the codec's business. A value is published only after its pass was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from moe_dist.tuning.problem import digest

T = TypeVar("T")
EPOCHS = "epochs"


class ByteStore(Protocol):
    """The part of a store that epochs need."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> bool: ...
    def list(self, prefix: str) -> list[str]: ...


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
