"""What agreeing and reloading cost as ranks and keys grow: requests, bytes and seconds. cli imports this.

Words are real, made and concluded from by the functions that serve. Up to `PROCESSES` ranks run as processes over a TCPStore,
and what passes through it is counted there; beyond, one process does the work of one rank, with the words of all, and counts what
`RankGroup` would send. Every key is a hit on every rank but those of the cold host, so that a pass has nothing but agreement in it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
from torch._C._distributed_c10d import TCPStore

from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.distributed.converge import RoundWord, combine_rounds
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import Answer, CellAnswer, CellOffer, Offer, Proposal, agree_offers, agree_plan, hit_digest, lacked_hits
from moe_dist.distributed.rendezvous import KEYS_A_REQUEST
from moe_dist.distributed.words import bundle, head_of, senders_of, unbundle
from moe_dist.errors import ConfigError
from moe_dist.stores.codec import decode_epoch, encode_epoch
from moe_dist.tuning.problem import Bucket, Cell, Epoch, Problem, Tactic, Timed, Winner

RANKS, KEYS = (8, 64, 512, 4096), (100, 1_000, 10_000)
WARM, COLD = "all hold every entry", "one host holds none"
CASES = (WARM, COLD)
PROCESSES = 8
NETWORK_BYTES_PER_S = 10e9 / 8
BUCKETS = 14
HOST = 8  # ranks of a host; of a smaller group, half
HIT_BYTES = 700  # an entry of a usual key
TACTICS = tuple(Tactic.of("triton", block_m=block, warps=4, stages=3) for block in (16, 32, 64, 128, 256))
TABLE = b"d" * 32  # the digest that all say in the end


def scaling_table(
    ranks: Sequence[int] = RANKS, keys: Sequence[int] = KEYS, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of ranks, keys, case, how, requests, said_bytes, read_bytes, server_bytes, network_seconds, seconds, round_bytes,
    epoch_bytes, reload_seconds.

    requests: to the rendezvous by all ranks, without looks in vain. said_bytes, read_bytes: of the rank that says (reads) most,
    all steps. server_bytes: through the rendezvous, in and out; network_seconds: those at 10 Gbit/s. seconds: of one rank's
    agreement; how says whether by "processes" (waits and transfers included) or "simulated" (its own work alone).
    round_bytes: through the rendezvous in one round of timing one cell. reload_seconds: taking an epoch apart.
    ConfigError: a number is out of range.
    """
    for name, numbers, least in (("ranks", ranks, 2), ("keys", keys, 1)):
        if (wrong := next((number for number in numbers if number < least), None)) is not None:
            raise ConfigError(f"{name} is {wrong}; scaling needs at least {least}")
    rows: list[dict[str, Any]] = []
    for count in keys:
        epoch_bytes, reload_seconds = _reload(_cells(count))
        for size in ranks:
            for case in CASES:
                if size <= PROCESSES:
                    how, (traffic, seconds) = "processes", run_processes(size, count, case)
                else:
                    how, (traffic, seconds) = "simulated", simulate(size, count, case)
                rows.append(
                    {
                        "ranks": size, "keys": count, "case": case, "how": how, "requests": traffic.requests,
                        "said_bytes": max(traffic.said), "read_bytes": max(traffic.read), "server_bytes": traffic.server_bytes,
                        "network_seconds": round(traffic.server_bytes / NETWORK_BYTES_PER_S, 4), "seconds": round(seconds, 3),
                        "round_bytes": round_bytes(size), "epoch_bytes": epoch_bytes, "reload_seconds": round(reload_seconds, 3),
                    }
                )  # fmt: skip
                note(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return rows


# -- what is said ------------------------------------------------------------------------------------------------------------


def _cells(count: int) -> list[Cell]:
    return [
        Cell(Problem.of("moe_layer", layer=at // BUCKETS, shape=(7168, 2048)), "cuda_graph", Bucket(1, 1 << (at % BUCKETS)))
        for at in range(count)
    ]


def cold_ranks(size: int, case: str) -> range:
    """The ranks that hold no entry: the last host's."""
    return range(size - min(HOST, size // 2), size) if case == COLD else range(0)


def _entries(keys: int) -> list[bytes]:
    return [at.to_bytes(8, "big") * (HIT_BYTES // 8) for at in range(keys)]


def _offer(cells: Sequence[Cell], entries: Sequence[bytes] | None) -> Offer:
    hits = [None] * len(cells) if entries is None else [hit_digest(entry) for entry in entries]
    offered = {cell: CellOffer(TACTICS[0], TACTICS, hit, 1) for cell, hit in zip(cells, hits, strict=True)}
    return Offer({"strategy": "reduce"}, {"device_name": "NVIDIA H200"}, offered)


def _yes(proposal: Proposal) -> Answer:
    return Answer(tuple(CellAnswer((None,) * len(cell.hits), (None,) * len(cell.candidates)) for cell in proposal.cells))


def _decode_offers(words: Sequence[bytes]) -> list[Offer]:
    known = {word: Offer.from_bytes(word) for word in dict.fromkeys(words)}
    return [known[word] for word in words]


# -- simulated ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Traffic:
    """said, read: bytes of words by each rank. requests: of all ranks."""

    said: list[int]
    read: list[int]
    requests: int = 0

    @property
    def server_bytes(self) -> int:
        return sum(self.said) + sum(self.read)

    def exchange(self, step: str, words: Sequence[bytes], reads: Sequence[Collection[int] | None]) -> None:
        """Count what `RankGroup.exchange` sends for these words of all ranks."""
        heads = {word: head_of(word) for word in dict.fromkeys(words)}
        said = [heads[word] for word in words]
        self._meet(step, said, bundle(said))
        senders = senders_of(said)
        for head, sender in senders.items():
            self.said[sender] += len(words[sender])
            self.requests += 1
            for rank, wanted in enumerate(reads):
                if said[rank] != head and (wanted is None or sender in wanted):
                    self.read[rank] += len(words[sender])
                    self.requests += 1
        waiting = (any(said[rank] != head and (wanted is None or sender in wanted) for head, sender in senders.items())
                   for rank, wanted in enumerate(reads))  # fmt: skip
        self.requests += sum(waiting)  # each looks once more, and then all are there

    def reduce(self, step: str, words: Sequence[bytes], combined: bytes) -> None:
        """The same for `RankGroup.reduce`."""
        self._meet(step, words, combined)

    def _meet(self, step: str, words: Sequence[bytes], concluded: bytes) -> None:
        size, published = len(words), len(msgpack.packb([[], concluded]))
        for rank, word in enumerate(words):
            own = len(msgpack.packb([f"run_pass, step {step}", word]))
            self.said[rank] += own + (published if rank == 0 else 0)
            self.read[0 if size else rank] += own
            self.read[rank] += published if rank else 0
        # Each shows progress, says its word, looks and reads; the leader reads all words and publishes.
        self.requests += 3 * size + (size - 1) + -(-size // KEYS_A_REQUEST) + 1


def simulate(size: int, keys: int, case: str) -> tuple[Traffic, float]:
    """(what passes through the rendezvous, seconds of the work of the leader, which does most) when `size` ranks agree."""
    traffic, cold, cells, entries = Traffic([0] * size, [0] * size), cold_ranks(size, case), _cells(keys), _entries(keys)
    colds = _offer(cells, None).to_bytes()
    started = time.perf_counter()
    warms = _offer(cells, entries).to_bytes()
    words = [colds if rank in cold else warms for rank in range(size)]
    own = head_of(warms)
    heads = [own if word is warms else b"#" + bytes(16) for word in words]
    unbundle(bundle(heads))
    offers = _decode_offers(words)
    proposal = agree_offers(offers, range(size))
    lacked = lacked_hits(proposal, offers)
    sent = msgpack.packb([entry for entry in entries if hit_digest(entry) in lacked])
    answer = _yes(proposal)
    said = answer.to_bytes()
    agree_plan(proposal, [Answer.from_bytes(said)] * size, range(size))
    seconds = time.perf_counter() - started
    traffic.exchange("agree-1", words, [None] * size)
    if lacked:
        nothing = msgpack.packb([])
        traffic.exchange("hits", [sent] + [nothing] * (size - 1), [{0} if rank in cold else set() for rank in range(size)])
    for step, word in (("agree-2", said), ("decide", TABLE)):
        traffic.exchange(step, [word] * size, [None] * size)
    return traffic, seconds


def round_bytes(size: int) -> int:
    """Through the rendezvous when `size` ranks have timed five candidates in one round, each its own times."""
    traffic = Traffic([0] * size, [0] * size)
    words = [
        RoundWord({tactic: Timed(10.0 + rank / 3 + at, 0.1, 9) for at, tactic in enumerate(TACTICS)}, 1.5).to_bytes(TACTICS)
        for rank in range(size)
    ]
    traffic.reduce("measure-0-0", words, combine_rounds(words, TACTICS, "max", range(size)))
    return traffic.server_bytes


def _reload(cells: Sequence[Cell]) -> tuple[int, float]:
    """(bytes of an epoch of these winners, seconds to take it apart)."""
    winner = Winner(TACTICS[1], 10.0, TACTICS[0], 12.0, "tuned")
    value = encode_epoch(
        Epoch(1, "scaling", dict.fromkeys(cells, winner)), {f"entries/{at:08d}": entry for at, entry in enumerate(_entries(len(cells)))}
    )
    started = time.perf_counter()
    decode_epoch(value)
    return len(value), time.perf_counter() - started


# -- real ranks --------------------------------------------------------------------------------------------------------------


class _Counting:
    """A rank's view of the rendezvous, which counts the words that it writes and reads, and its requests; looks in vain are none."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.said = self.read = self.requests = 0

    def clone(self) -> _Counting:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        there = bool(self._store.check(keys))
        self.requests += there
        return there

    def set(self, key: str, value: Any) -> None:
        self.requests += 1
        self.said += len(value) if "/progress/" not in key else 0
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        values: list[bytes] = self._store.multi_get(keys)
        self.read += sum(map(len, values))
        return values


def run_processes(size: int, keys: int, case: str) -> tuple[Traffic, float]:
    """(what passed through the rendezvous, seconds of the slowest rank's agreement) with real ranks."""
    with tempfile.TemporaryDirectory(prefix="moe-dist-scaling-") as folder:
        outcomes = run_ranks(_agree_on_a_rank, size, Path(folder), keys, case, deadline=600.0)
    if failed := [f"rank {rank}: {outcome.error}: {outcome.message}" for rank, outcome in enumerate(outcomes) if outcome.error]:
        raise RuntimeError("; ".join(failed))
    seconds, said, read, requests = zip(*(outcome.value for outcome in outcomes), strict=True)
    return Traffic(list(said), list(read), sum(requests)), max(seconds)


def _agree_on_a_rank(rank: Rank, keys: int, case: str) -> tuple[float, int, int, int]:
    """(seconds, bytes said, bytes read, requests), from the first word to the last digest."""
    cells, entries = _cells(keys), _entries(keys)
    held = {} if rank.index in cold_ranks(rank.size, case) else {hit_digest(entry): entry for entry in entries}
    store = _Counting(TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False))
    deadlines = {"progress_timeout": timedelta(seconds=300), "cap": timedelta(seconds=600)}
    group = RankGroup(store, rank.index, rank.size, **deadlines)  # type: ignore[arg-type]
    group._look_s = 60.0  # what looks around find would be counted
    group.begin_pass("run_pass")
    group.exchange("start", b"")
    store.said = store.read = store.requests = 0
    started = time.monotonic()
    offers = _decode_offers(group.exchange("agree-1", _offer(cells, entries if held else None).to_bytes()))
    proposal = agree_offers(offers, group.names)
    if lacked := lacked_hits(proposal, offers):
        wanted = {sender for hit, sender in lacked.items() if hit not in held}
        mine = [held[hit] for hit, sender in lacked.items() if sender == rank.index]
        words = group.exchange("hits", msgpack.packb(mine), reads=wanted)
        held |= {hit_digest(entry): entry for sender in wanted for entry in msgpack.unpackb(words[sender])}
    assert all(hit in held for cell in proposal.cells for hit in cell.hits)
    words = group.exchange("agree-2", _yes(proposal).to_bytes())
    answers = {word: Answer.from_bytes(word) for word in dict.fromkeys(words)}
    agree_plan(proposal, [answers[word] for word in words], group.names)
    group.exchange("decide", TABLE)
    seconds, counted = time.monotonic() - started, (store.said, store.read, store.requests)
    group.commit(TABLE.decode())
    group.close()
    return seconds, *counted
