"""A store in this process's memory: for tests, and for tuning that need not outlive the process.

Two opened from "memory:" share nothing, and nothing survives the process: `put` is False by the contract.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_dist.stores.base import check_key, check_value


class MemoryStore:
    url = "memory:"
    degraded = None

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._values.get(check_key(key))

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        return {key: self._values[key] for key in map(check_key, keys) if key in self._values}

    def put(self, key: str, value: bytes) -> bool:
        self._values[check_key(key)] = bytes(check_value(value))
        return False

    def delete(self, key: str) -> None:
        self._values.pop(check_key(key), None)

    def list(self, prefix: str) -> list[str]:
        start = check_key(prefix) + "/" if prefix else ""
        return sorted(key for key in self._values if key.startswith(start))

    def close(self) -> None:
        """Nothing to release; what was put stays readable."""

    def __repr__(self) -> str:
        return "MemoryStore()"
