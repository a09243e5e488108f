"""What stores cost: attaching one with thousands of entries, and reloading an epoch of a thousand winners on two ranks.

Owns the clock and the made-up entries; what is done between its ticks is what a tuner does. cli and tests import this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_dist.backends.base import MoEProblem
from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.bench.server import ServerLost
from moe_dist.config import ExpertConfig, MoEConfig, RoutingConfig
from moe_dist.distributed import epoch
from moe_dist.errors import StoreError, first_line
from moe_dist.stores.base import Store
from moe_dist.stores.codec import decode_entry, encode_entry, encode_epoch
from moe_dist.stores.leftovers import without_new_folders
from moe_dist.stores.open import open_store
from moe_dist.tuning.identity import Environment, Key, build_environment
from moe_dist.tuning.problem import Bucket, Cell, Entry, Epoch, ProbeSpec, Tactic, Timed, Winner, pack
from moe_dist.tuning.tuner import Tuner

STORES = ("file", "redis", "layered")
ENTRIES, WINNERS, REPEATS = 10_000, 1_000, 15
# What is measured: of how many, and the bar in seconds. A "first reload" is a process's first, with nothing of it in any cache.
LIMITS_S = {"attach": (ENTRIES, 0.5), "reload": (WINNERS, 0.05), "first reload": (WINNERS, 0.05)}
RANKS = 2
_TICK_S = 0.25  # a reload starts with one of these, on all ranks alike
_BUCKETS = [Bucket(1, 1), *(Bucket((1 << power) + 1, 2 << power) for power in range(14))]


def stores_table(
    urls: Sequence[str],
    *,
    entries: int = ENTRIES,
    winners: int = WINNERS,
    repeats: int = REPEATS,
    note: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Three rows a store, those of `LIMITS_S`: seconds, median and worst of `repeats`, and the machine's load. Leaves the stores as they were.

    attach: open the URL, list one environment's entries, read them all; decode_s is what taking every one of them apart would add (an
    entry is taken apart when it is hit). reload: `Tuner.reload` of a group of two, from its call to its return, on the slower rank; the
    first one of its processes, and those that follow it.
    StoreError: a store takes no writes. ServerLost: it did at first; the rows before are good.
    """
    made = made_up(entries, build_environment(torch.device("cpu")))
    measures: list[Callable[[str], dict[str, Any]]] = [
        lambda url: _attach_row(url, made, repeats),
        lambda url: _row(url, "reload", winners, _reloads(url, winners, 1 + repeats)[1:]),
        lambda url: _row(url, "first reload", winners, [_reloads(url, winners, 1)[0] for _ in range(repeats)]),
    ]
    for url in urls:
        said = []
        for measure in measures:
            row = measure(url)
            said.append(f"{row['what']} from {row['store']} in {row['median_s']:.3f} s")
            yield row
        note("; ".join(said))


def _row(url: str, what: str, count: int, seconds: list[float]) -> dict[str, Any]:
    store = open_store(url)
    store.close()
    median, (_, limit_s) = statistics.median(seconds), LIMITS_S[what]
    return {
        "store": store.url.partition(":")[0], "what": what, "count": count, "median_s": round(median, 4), "worst_s": round(max(seconds), 4),
        "limit_s": limit_s, "holds": median < limit_s, "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def _attach_row(url: str, made: list[tuple[Cell, Winner, Key, bytes]], repeats: int) -> dict[str, Any]:
    folder = f"bench/{uuid.uuid4().hex}"
    with _emptied(url, folder) as store:
        for number, (_, _, _, value) in enumerate(made):
            if not store.put(f"{folder}/{number:08d}", value):
                reason = store.degraded or "it is not durable"
                if number == 0:
                    raise StoreError(f"store {store.url} takes no writes: {reason}")
                raise ServerLost(
                    f"store {store.url} was lost after {number} of {len(made)} entries were written: {reason}; {_left(folder)}"
                )
        seconds = [_attach(url, folder, len(made)) for _ in range(repeats)]
        decode = [_decode([value for *_, value in made]) for _ in range(repeats)]
    return {**_row(url, "attach", len(made), seconds), "decode_s": round(statistics.median(decode), 4)}


@contextlib.contextmanager
def _emptied(url: str, folder: str) -> Iterator[Store]:
    """The store at `url`, in which nothing is below `folder` after the block, and no folder that was not there before."""
    store = open_store(url)
    try:
        with without_new_folders(store, folder):
            try:
                yield store
            finally:
                for key in store.list(folder):
                    store.delete(key)
    finally:
        store.close()


def _attach(url: str, folder: str, count: int) -> float:
    began = time.perf_counter()
    store = open_store(url)
    found = store.get_many(store.list(folder))
    took = time.perf_counter() - began
    store.close()
    if len(found) != count:
        reason = f": {store.degraded}" if store.degraded else ""
        raise ServerLost(f"store {store.url} was lost: {len(found)} of {count} entries came back{reason}; {_left(folder)}")
    return took


def _left(folder: str) -> str:
    return f"if it lives, it may keep keys below {folder}"


def _decode(values: list[bytes]) -> float:
    began = time.perf_counter()
    for value in values:
        decode_entry(value)
    return time.perf_counter() - began


def _reloads(url: str, winners: int, repeats: int) -> list[float]:
    """Seconds of the slower rank, of two that are started for it."""
    deployment = f"bench-{uuid.uuid4().hex}"
    with _emptied(url, epoch.folder(deployment)) as store, tempfile.TemporaryDirectory(prefix="moe-dist-stores-") as folder:
        outcomes = run_ranks(_reload, RANKS, Path(folder), url, deployment, winners, repeats, deadline=300.0)
    # A rank that the store failed says so; its peer, that the rank has left it.
    for outcome in sorted(outcomes, key=lambda outcome: outcome.error != StoreError.__name__):
        if outcome.error:
            words = f"a reload from store {store.url} ended in {outcome.error}: {first_line(Exception(outcome.message))}"
            raise ServerLost(f"{words}; {_left(epoch.folder(deployment))}")
    return [max(took) for took in zip(*(outcome.value for outcome in outcomes), strict=True)]


def _reload(rank: Rank, url: str, deployment: str, winners: int, repeats: int) -> list[float]:
    """On a rank: again and again the first one publishes a newer epoch, in which every time is another, and all read it."""
    logging.disable()  # what a store does not take is said by who started this
    store = open_store(url)
    seconds = []
    with Tuner(store=store, group=rank.group(), deployment=deployment, device="cpu") as tuner:
        made = made_up(winners, tuner.environment) if rank.index == 0 else []
        for number in range(1, repeats + 1):
            if rank.index == 0:
                table = Epoch(
                    number, deployment, {cell: replace(winner, tactic_us=winner.tactic_us + number) for cell, winner, _, _ in made}
                )
                value = encode_epoch(table, {key.path: value for _, _, key, value in made})
                published = epoch.publish(store, table, value, [tuner.environment.digest])
                rank.mark(f"published-{number}")
                if not published:
                    raise StoreError(f"it takes no writes: {store.degraded or 'it is not durable'}")
            rank.wait(f"published-{number}")
            time.sleep(_TICK_S - time.monotonic() % _TICK_S)
            began = time.perf_counter()
            adopted = tuner.reload()
            seconds.append(time.perf_counter() - began)
            if not adopted or (tuner.epoch.number, len(tuner.epoch.winners)) != (number, winners):
                raise StoreError(f"the newest epoch did not come back{f': {store.degraded}' if store.degraded else ''}")
    store.close()
    return seconds


def made_up(count: int, environment: Environment) -> list[tuple[Cell, Winner, Key, bytes]]:
    """Cells of MoE problems that differ in their expert count, the winner of each, and its entry of a real size; the times are drawn."""
    made: list[tuple[Cell, Winner, Key, bytes]] = []
    draw, default = random.Random(0).random, Tactic.of("torch_grouped")
    while len(made) < count:
        routing = RoutingConfig(num_experts=8 + len(made), top_k=8)
        experts = ExpertConfig(hidden_size=7168, intermediate_size=2048)
        problem = MoEProblem.of(MoEConfig(routing=routing, experts=experts), routed=False).key()
        for bucket in _BUCKETS[: count - len(made)]:
            cell = Cell(problem, "cuda_graph", bucket)
            tactic = Tactic.of("triton", block_m=16 << (len(made) % 4), block_n=128, block_k=64, num_warps=8, num_stages=4, swap_ab=False)
            key = Key(environment=environment, cell=cell, policy="cuda_graph", objective="max", probe=ProbeSpec())
            time_, slower = Timed(10 + draw(), draw(), 40), Timed(20 + draw(), draw(), 40)
            entry = Entry(pack(key.canonical()), tactic, time_, default, slower, {"host": "node1", "pid": "4711"})
            made.append((cell, Winner(tactic, time_.median_us, default, slower.median_us, "epoch"), key, encode_entry(entry)))
    return made
