"""What stores cost: attaching one with thousands of entries, and reloading an epoch of a thousand winners.

Owns the clock and the made-up entries; whoever calls `measure_stores` prints and keeps the rows.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from moe_dist.backends.base import MoEProblem
from moe_dist.config import ExpertConfig, MoEConfig, RoutingConfig
from moe_dist.errors import StoreError
from moe_dist.stores.codec import decode_epoch, encode_entry, encode_epoch
from moe_dist.stores.open import open_store
from moe_dist.tuning.problem import Bucket, Cell, Entry, Epoch, Tactic, Timed, Winner, pack

ATTACH_LIMIT_S = 0.5  # 10,000 entries
RELOAD_LIMIT_S = 0.05  # 1,000 winners
_BUCKETS = [Bucket(1, 1), *(Bucket((1 << power) + 1, 2 << power) for power in range(14))]


def measure_stores(urls: Sequence[str], *, entries: int = 10_000, winners: int = 1_000, repeats: int = 5) -> list[dict[str, Any]]:
    """Two rows a store, "attach" and "reload", in seconds: median and worst of `repeats`. Leaves the stores as they were.

    attach: open the URL, list one environment's entries, read them all. reload: open it, read an epoch, decode it and digest its
    table, as a rank of a group does. StoreError: a store takes no writes, or does not give them back.
    """
    cells, encoded = _made_up(max(entries, winners))
    return [row for url in urls for row in _measure_store(url, cells, encoded, entries, winners, repeats)]


def _measure_store(
    url: str, cells: dict[Cell, Winner], encoded: list[bytes], entries: int, winners: int, repeats: int
) -> list[dict[str, Any]]:
    folder = f"bench/{uuid.uuid4().hex}"
    values = {f"{folder}/{number:08d}": value for number, value in enumerate(encoded)}
    epoch = Epoch(1, "bench", dict(list(cells.items())[:winners]))
    store = open_store(url)
    try:
        for key in list(values)[:entries]:
            store.put(key, values[key])
        if not store.put(f"{folder}/epoch/1", encode_epoch(epoch, dict(list(values.items())[:winners]))):
            raise StoreError(f"store {store.url} takes no writes: {store.degraded or 'it is not durable'}")
        attach = [_timed(lambda: _attach(url, folder, entries + 1)) for _ in range(repeats)]
        reload = [_timed(lambda: _reload(url, f"{folder}/epoch/1", epoch.digest)) for _ in range(repeats)]
    finally:
        for key in store.list(folder):
            store.delete(key)
        store.close()
    shown = {"store": store.url.partition(":")[0], "value_bytes": len(encoded[0])}
    return [
        {**shown, "what": "attach", "count": entries, **_summary(attach), "limit_s": ATTACH_LIMIT_S},
        {**shown, "what": "reload", "count": winners, **_summary(reload), "limit_s": RELOAD_LIMIT_S},
    ]


def _attach(url: str, folder: str, count: int) -> None:
    store = open_store(url)
    found = store.get_many(store.list(folder))
    store.close()
    if len(found) != count:
        raise StoreError(f"{len(found)} of {count} values came back from {store.url}")


def _reload(url: str, key: str, digest: str) -> None:
    store = open_store(url)
    value = store.get(key)
    store.close()
    if value is None or decode_epoch(value)[0].digest != digest:
        raise StoreError(f"the epoch did not come back from {store.url}")


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "worst_s": max(seconds)}


def _made_up(count: int) -> tuple[dict[Cell, Winner], list[bytes]]:
    """Cells of MoE problems that differ in their expert count, one winner each, and their entries, of a real size."""
    cells: dict[Cell, Winner] = {}
    entries = []
    time_ = Timed(12.5, 0.25, 40)
    default = Tactic.of("torch_grouped")
    environment = dict.fromkeys(("gpu", "driver", "cuda", "torch", "triton", "release", "kernels", "foreign"), "0123456789abcdef")
    while len(cells) < count:
        routing = RoutingConfig(num_experts=8 + len(cells), top_k=8)
        problem = MoEProblem.of(
            MoEConfig(routing=routing, experts=ExpertConfig(hidden_size=7168, intermediate_size=2048)), routed=False
        ).key()
        for bucket in _BUCKETS:
            cell = Cell(problem, "cuda_graph", bucket)
            tactic = Tactic.of("triton", block_m=16 << (len(cells) % 4), block_n=128, block_k=64, num_warps=8, num_stages=4, swap_ab=False)
            cells[cell] = Winner(tactic, time_.median_us, default, 20.0, "epoch")
            key = pack(["Key", environment, cell, "events"])
            entries.append(encode_entry(Entry(key, tactic, time_, default, time_, {"host": "node1", "pid": "4711"})))
    return cells, entries
