"""What agreeing and reloading cost as ranks and keys grow: requests, bytes and seconds. cli imports this.

Words are real, made and concluded from by the functions that serve. Up to `PROCESSES` ranks run as processes over a TCPStore;
beyond, one process does the work of one rank, with the words of all. Every key is a hit on every rank, so that a pass has
nothing but agreement in it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.distributed.group import bundle, unbundle
from moe_dist.distributed.plan import Answer, CellAnswer, CellOffer, Offer, agree_offers, agree_plan
from moe_dist.stores.codec import decode_epoch, encode_epoch
from moe_dist.tuning.problem import Bucket, Cell, Epoch, Problem, Tactic, Winner

RANKS, KEYS = (8, 64, 512, 4096), (100, 1_000, 10_000)
PROCESSES = 8
BUCKETS = 14
HIT = b"e" * 700  # an entry of a usual key
TACTICS = tuple(Tactic.of("triton", block_m=block, warps=4, stages=3) for block in (16, 32, 64, 128, 256))
# Steps of a pass in which all hits: agree-1, agree-2, decide. In each a rank shows progress, says its word, looks, reads the bundle and
# forgets its last word; the leader reads every word, publishes, and forgets two. The commit is a write or a look, and a read.
STEPS = 3


def scaling_table(
    ranks: Sequence[int] = RANKS, keys: Sequence[int] = KEYS, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of ranks, keys, how, requests, word_bytes, bundle_bytes, server_bytes, seconds, epoch_bytes, reload_seconds.

    requests: to the rendezvous by all ranks, without the looks of those that wait. word_bytes: of one rank, all steps.
    bundle_bytes: what it reads. server_bytes: through the rendezvous, all ranks. seconds: of one rank's agreement; how says
    whether by "processes" (waits and transfers included) or "simulated" (its own work alone).
    """
    rows: list[dict[str, Any]] = []
    for count in keys:
        cells = _cells(count)
        epoch_bytes, reload_seconds = _reload(cells)
        for size in ranks:
            word, bundled, seconds = _agree(cells, size)
            how = "simulated"
            if size <= PROCESSES:
                how, seconds = "processes", _processes(size, count)
            rows.append(
                {
                    "ranks": size, "keys": count, "how": how, "requests": STEPS * (6 * size + 1) + 2 * size, "word_bytes": word,
                    "bundle_bytes": bundled, "server_bytes": size * (word + bundled), "seconds": round(seconds, 3),
                    "epoch_bytes": epoch_bytes, "reload_seconds": round(reload_seconds, 3),
                }
            )  # fmt: skip
            note(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return rows


def _cells(count: int) -> list[Cell]:
    return [
        Cell(Problem.of("moe_layer", layer=at // BUCKETS, shape=(7168, 2048)), "cuda_graph", Bucket(1, 1 << (at % BUCKETS)))
        for at in range(count)
    ]


def _offer(cells: Sequence[Cell]) -> Offer:
    return Offer({"strategy": "reduce"}, {"device_name": "NVIDIA H200"}, {cell: CellOffer(TACTICS[0], TACTICS, HIT, 1) for cell in cells})


def _agree(cells: Sequence[Cell], size: int) -> tuple[int, int, float]:
    """(bytes of a rank's words, bytes that it reads, seconds of its work) when `size` ranks say the same."""
    started = time.perf_counter()
    first = _offer(cells).to_bytes()
    bundled = bundle([first] * size)
    offers = {word: Offer.from_bytes(word) for word in dict.fromkeys(unbundle(bundled))}
    proposal = agree_offers([offers[first]] * size, range(size))
    answer = Answer(tuple(CellAnswer((None,), (None,) * len(TACTICS)) for _ in proposal.cells))
    second = answer.to_bytes()
    rebundled = bundle([second] * size)
    answers = {word: Answer.from_bytes(word) for word in dict.fromkeys(unbundle(rebundled))}
    agree_plan(proposal, [answers[second]] * size, range(size))
    seconds = time.perf_counter() - started
    digest = b"d" * 32
    return len(first) + len(second) + len(digest), len(bundled) + len(rebundled) + len(bundle([digest] * size)), seconds


def _reload(cells: Sequence[Cell]) -> tuple[int, float]:
    """(bytes of an epoch of these winners, seconds to take it apart)."""
    winner = Winner(TACTICS[1], 10.0, TACTICS[0], 12.0, "tuned")
    value = encode_epoch(Epoch(1, "scaling", dict.fromkeys(cells, winner)), {f"entries/{at:08d}": HIT for at in range(len(cells))})
    started = time.perf_counter()
    decode_epoch(value)
    return len(value), time.perf_counter() - started


def _processes(size: int, keys: int) -> float:
    with tempfile.TemporaryDirectory(prefix="moe-dist-scaling-") as folder:
        outcomes = run_ranks(_agree_on_a_rank, size, Path(folder), keys, deadline=600.0)
    if failed := [f"rank {rank}: {outcome.error}: {outcome.message}" for rank, outcome in enumerate(outcomes) if outcome.error]:
        raise RuntimeError("; ".join(failed))
    return max(float(outcome.value) for outcome in outcomes)


def _agree_on_a_rank(rank: Rank, keys: int) -> float:
    cells = _cells(keys)
    group = rank.group(progress_timeout=300.0, cap=600.0)
    group.begin_pass()
    group.exchange("start", b"")
    started = time.monotonic()
    words = group.exchange("agree-1", _offer(cells).to_bytes())
    offers = {word: Offer.from_bytes(word) for word in dict.fromkeys(words)}
    proposal = agree_offers([offers[word] for word in words], group.names)
    answer = Answer(tuple(CellAnswer((None,), (None,) * len(TACTICS)) for _ in proposal.cells))
    words = group.exchange("agree-2", answer.to_bytes())
    answers = {word: Answer.from_bytes(word) for word in dict.fromkeys(words)}
    agree_plan(proposal, [answers[word] for word in words], group.names)
    group.exchange("decide", b"d" * 32)
    group.commit("d" * 32)
    seconds = time.monotonic() - started
    group.close()
    return seconds
