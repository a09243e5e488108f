"""What agreeing, tuning and reloading cost as ranks and keys grow: requests, bytes and seconds. cli imports this.

Words are real, made and concluded from by the functions that serve. Up to `PROCESSES` ranks agree and reload as processes over a
TCPStore, and what passes through it and the store is counted there; beyond, one process does the work of one rank, with the words of
all, and counts what `RankGroup` would send. What thousands of clients get out of one real server is measured with their sockets.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch._C._distributed_c10d import TCPStore

from moe_dist.bench.late import late_step
from moe_dist.bench.persistence import made_up
from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.distributed import epoch
from moe_dist.distributed.converge import RoundWord, combine_rounds
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import (
    Answer,
    CellAnswer,
    CellOffer,
    Offer,
    Proposal,
    agree_offers,
    agree_plan,
    hit_digest,
    lacked_hits,
    pack_hits,
    unpack_hits,
)
from moe_dist.distributed.rendezvous import KEYS_A_REQUEST
from moe_dist.distributed.words import bundle, head_of, senders_of, unbundle
from moe_dist.errors import ConfigError
from moe_dist.stores.codec import decode_epoch, encode_epoch
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning.apart import pack_table
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Cell, Epoch, Tactic, Timed, digest
from moe_dist.tuning.tuner import Tuner

RANKS, KEYS = (8, 64, 512, 4096), (100, 1_000, 10_000)
ANY = "any"
ATTACH, WARM, COLD, TUNE, RELOAD = "attach", "agree, all hold every entry", "agree, one host holds none", "tune", "reload"
# (phase, strategy) of every row; where all strategies take the same steps, it is any.
CASES = ((ATTACH, ANY), (WARM, ANY), (COLD, ANY), (TUNE, "reduce"), (TUNE, "shard"), (TUNE, "reload"), (RELOAD, ANY))
ON_TIME, LATE = "a step, nobody late", "a step, one rank 2 s late"
STEPS = {ON_TIME: 0.0, LATE: 2.0}  # seconds that one rank is late
STEP_KEYS = 1  # of their rows: a step is of one
PROCESSES = 8
NETWORK_BYTES_PER_S = 10e9 / 8
REQUESTS_PER_S = 20_000  # that one rendezvous answers; the table of servers has what was measured
LIMIT_S = 10.0  # of a phase in which nothing is timed: what a start may take longer
TIMING_S = (
    0.7  # that timing a cell takes at the least, with all kernels compiled (docs/evidence/launcher-h200x2): exchanges may take as long
)
ATTEMPTS = 5
HOST = 8  # ranks of a host; of a smaller group, half
TACTICS = tuple(Tactic.of("triton", block_m=block, warps=4, stages=3) for block in (16, 32, 64, 128, 256))
TABLE = b"d" * 32  # the digest that all say in the end
ENVIRONMENT = dataclasses.replace(build_environment(torch.device("cpu")), host_threads=1)  # what each of its ranks runs with
DEPLOYMENT = "scaling"


def scaling_table(
    ranks: Sequence[int] = RANKS, keys: Sequence[int] = KEYS, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of phase, strategy, ranks, keys, how, requests, said_bytes, read_bytes, server_bytes, store_reads, store_bytes, seconds,
    expected_s, limit_s, holds.

    requests: to the rendezvous by all ranks, without looks in vain; in the rows of one step with them. said_bytes, read_bytes: of the rank that says (reads) most,
    all steps. server_bytes: through the rendezvous, in and out. store_reads, store_bytes: values and bytes that all ranks read from the
    store. seconds: of one rank's work; how says whether by "processes" (waits and transfers included) or "simulated" (its own work alone).
    In the rows of one step: from the last rank's word to the end of the last rank's step, answers included, which is what is expected.
    expected_s: seconds, the requests at `REQUESTS_PER_S` and all bytes at 10 Gbit/s, one after the other; holds: that is within limit_s,
    and so are the rounds of `reduce` and `shard` with their looks in vain: as many steps in which nobody is late.
    ConfigError: a number is out of range.
    """
    for name, numbers, least in (("ranks", ranks, 2), ("keys", keys, 1)):
        if (wrong := next((number for number in numbers if number < least), None)) is not None:
            raise ConfigError(f"{name} is {wrong}; scaling needs at least {least}")
    rows: list[dict[str, Any]] = []
    steps = {(phase, size): simulate_step(size, phase) for size in ranks for phase in STEPS}
    for count in keys:
        for size in ranks:
            for phase, strategy in CASES:
                how, (traffic, seconds) = "simulated", (Traffic([0] * size, [0] * size), 0.0)
                if phase == ATTACH:
                    traffic.store_reads, traffic.store_bytes = size * count, size * sum(map(len, _entries(count)))
                elif phase == TUNE:
                    traffic, seconds = simulate_tuning(size, count, strategy)
                elif phase == RELOAD:
                    how, (traffic, seconds) = (
                        ("processes", reload_processes(size, count)) if size <= PROCESSES else (how, simulate_reload(size, count))
                    )
                else:
                    how, (traffic, seconds) = (
                        ("processes", run_processes(size, count, phase)) if size <= PROCESSES else (how, simulate(size, count, phase))
                    )
                looking_s = 0.0
                if phase == TUNE and strategy != "reload":
                    looking_s = count * rounds_of(strategy) * steps[ON_TIME, size][1]
                rows.append(_row(phase, strategy, size, count, how, traffic, seconds, looking_s))
                note(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    for size in ranks:
        for phase in STEPS:
            rows.append(_row(phase, ANY, size, STEP_KEYS, "simulated", *steps[phase, size]))
            note(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return rows


def _row(
    phase: str, strategy: str, size: int, count: int, how: str, traffic: Traffic, seconds: float, looking_s: float = 0.0
) -> dict[str, Any]:
    """looking_s: what its rounds take with looks in vain."""
    limit_s = count * TIMING_S if phase == TUNE or phase in STEPS else LIMIT_S
    answers_s = 0.0 if phase in STEPS else traffic.requests / REQUESTS_PER_S
    expected_s = seconds + answers_s + (traffic.server_bytes + traffic.store_bytes) / NETWORK_BYTES_PER_S
    return {
        "phase": phase, "strategy": strategy, "ranks": size, "keys": count, "how": how, "requests": traffic.requests,
        "said_bytes": max(traffic.said), "read_bytes": max(traffic.read), "server_bytes": traffic.server_bytes,
        "store_reads": traffic.store_reads, "store_bytes": traffic.store_bytes, "seconds": round(seconds, 3),
        "expected_s": round(expected_s, 3), "limit_s": limit_s, "holds": max(expected_s, looking_s) <= limit_s,
    }  # fmt: skip


# -- what is said ------------------------------------------------------------------------------------------------------------


@functools.cache
def _made(count: int) -> list[Any]:
    return made_up(count, ENVIRONMENT)


def _cells(count: int) -> list[Cell]:
    return [cell for cell, *_ in _made(count)]


def _entries(count: int) -> list[bytes]:
    return [entry for *_, entry in _made(count)]


@functools.cache
def epoch_of(count: int) -> tuple[Epoch, bytes]:
    """An epoch of that many winners, and its value."""
    table = Epoch(1, DEPLOYMENT, {cell: winner for cell, winner, *_ in _made(count)})
    return table, encode_epoch(table, {key.path: entry for _, _, key, entry in _made(count)})


def cold_ranks(size: int, phase: str) -> range:
    """The ranks that hold no entry: the last host's."""
    return range(size - min(HOST, size // 2), size) if phase == COLD else range(0)


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
    """said, read: bytes of words by each rank; names: of what is asked for, where they are counted. requests: of all ranks. store_reads, store_bytes: by all ranks from the store."""

    said: list[int]
    read: list[int]
    requests: int = 0
    store_reads: int = 0
    store_bytes: int = 0
    names: int = 0
    former: int = -1  # values of the step before, which go in the next one; -1: a step's words

    @property
    def server_bytes(self) -> int:
        return sum(self.said) + sum(self.read) + self.names

    def exchange(self, step: str, words: Sequence[bytes], reads: Sequence[Collection[int] | None], call: str = "run_pass") -> None:
        """Count what `RankGroup.exchange` sends for these words of all ranks."""
        heads = {word: head_of(word) for word in dict.fromkeys(words)}
        said = [heads[word] for word in words]
        self._meet(call, step, said, bundle(said))
        senders = senders_of(said)
        for head, sender in senders.items():
            self.said[sender] += len(words[sender])
            self.requests += 1
            self.former += 1
            for rank, wanted in enumerate(reads):
                if said[rank] != head and (wanted is None or sender in wanted):
                    self.read[rank] += len(words[sender])
                    self.requests += 1
        waiting = (any(said[rank] != head and (wanted is None or sender in wanted) for head, sender in senders.items())
                   for rank, wanted in enumerate(reads))  # fmt: skip
        self.requests += sum(waiting)  # each looks once more, and then all are there

    def reduce(self, step: str, words: Sequence[bytes], combined: bytes, call: str = "run_pass") -> None:
        """The same for `RankGroup.reduce`."""
        self._meet(call, step, words, combined)

    def _meet(self, call: str, step: str, words: Sequence[bytes], concluded: bytes) -> None:
        size, published = len(words), len(msgpack.packb([[], concluded]))
        for rank, word in enumerate(words):
            own = len(msgpack.packb([f"{call}, step {step}", word]))
            self.said[rank] += own + (published if rank == 0 else 0)
            self.read[0] += own
            self.read[rank] += published if rank else 0
        # Each shows progress, says its word, looks and reads; the leader reads all words and publishes. Then what was said before goes.
        self.requests += 3 * size + (size - 1) + -(-size // KEYS_A_REQUEST) + 1 + (size + 1 if self.former < 0 else self.former)
        self.former = size + 1


def simulate(size: int, keys: int, phase: str) -> tuple[Traffic, float]:
    """(what passes through the rendezvous, seconds of the work of the leader, which does most) when `size` ranks agree."""
    traffic, cold, cells, entries = Traffic([0] * size, [0] * size), cold_ranks(size, phase), _cells(keys), _entries(keys)
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
    sent = pack_hits([entry for entry in entries if hit_digest(entry) in lacked])
    answer = _yes(proposal)
    said = answer.to_bytes()
    agree_plan(proposal, [Answer.from_bytes(said)] * size, range(size))
    seconds = time.perf_counter() - started
    traffic.exchange("agree-1", words, [None] * size)
    if lacked:
        nothing = pack_hits([])
        traffic.exchange("hits", [sent] + [nothing] * (size - 1), [{0} if rank in cold else set() for rank in range(size)])
    for step, word in (("agree-2", said), ("decide", TABLE)):
        traffic.exchange(step, [word] * size, [None] * size)
    return traffic, seconds


def simulate_tuning(size: int, keys: int, strategy: str) -> tuple[Traffic, float]:
    """(what passes when every key is timed, seconds of the leader's work beside the timing)."""
    if strategy == "reload":
        return _simulate_apart(size, keys)
    traffic, words, attempts = Traffic([0] * size, [0] * size), round_words(size), []
    for _ in range(ATTEMPTS):
        started = time.perf_counter()
        combined = combine_rounds(words, TACTICS, "max", range(size))
        attempts.append(time.perf_counter() - started)
    seconds = min(attempts)  # of other work on the machine a thousand rounds would make minutes
    rounds = rounds_of(strategy)
    traffic.reduce("measure-0-0", words, combined)
    for tally in (traffic.said, traffic.read):
        tally[:] = [count * rounds * keys for count in tally]
    traffic.requests *= rounds * keys
    return traffic, seconds * rounds * keys


def round_words(size: int) -> list[bytes]:
    """What the ranks say of one round."""
    times = ({tactic: Timed(10.0 + rank / 3 + at, 0.1, 9) for at, tactic in enumerate(TACTICS)} for rank in range(size))
    return [RoundWord(measured, 1.5).to_bytes(TACTICS) for measured in times]


def simulate_step(size: int, phase: str) -> tuple[Traffic, float]:
    """(what passes in one round of timing, looks in vain and the names of what is looked for included, seconds from the last rank's word)."""
    step = late_step(round_words(size), lambda words: combine_rounds(words, TACTICS, "max", range(size)), STEPS[phase], REQUESTS_PER_S)
    return Traffic(step.said, step.read, step.requests, names=step.names), step.seconds


def rounds_of(strategy: str) -> int:
    """Exchanges of a cell under `reduce` and `shard`, which splits the candidates first."""
    return 1 + MeasurementPolicy().rounds + (strategy == "shard")


def _simulate_apart(size: int, keys: int) -> tuple[Traffic, float]:
    """Strategy `reload`, where every rank has a winner of its own for each key."""
    traffic = Traffic([0] * size, [0] * size)
    word = msgpack.packb([{index: index % len(TACTICS) for index in range(keys)}, {index: [] for index in range(keys)}])
    started = time.perf_counter()
    published = [msgpack.unpackb(said, strict_map_key=False) for said in [word] * min(size, 64)]
    failed: dict[int, list[Any]] = {}
    for _, failed_there in published:
        for index, rows in failed_there.items():
            failed.setdefault(index, []).extend(rows)
    seconds = (time.perf_counter() - started) * size / len(published)
    started = time.perf_counter()
    table = pack_table(dict(enumerate(_entries(keys))))
    seconds += time.perf_counter() - started
    traffic.reduce("reload-published", [word] * size, msgpack.packb([failed, {}]))
    leads, follows = (msgpack.packb([f"proposals/{digest(DEPLOYMENT)}/{digest(held)}", digest(held), bool(held)]) for held in (table, b""))
    traffic.exchange("spread-key", [leads] + [follows] * (size - 1), [None] * size)
    traffic.exchange("spread-found", [b"yes"] * size, [None] * size)
    _read_by_hosts(traffic, size, len(table))
    return traffic, seconds


def simulate_reload(size: int, keys: int, hosts: int | None = None) -> tuple[Traffic, float]:
    """(what passes in `Tuner.reload` of a new epoch, seconds of a rank that takes it apart). hosts: None: of `HOST` ranks each."""
    table, value = epoch_of(keys)
    traffic, call = Traffic([0] * size, [0] * size), "reload"
    started = time.perf_counter()
    decode_epoch(value, deployment=DEPLOYMENT)
    wanted, committed = digest(value), dataclasses.replace(table).digest
    seconds = time.perf_counter() - started
    key = epoch.EpochName.of(table, [ENVIRONMENT.digest]).key(DEPLOYMENT)
    named = [key, wanted, [1, committed, []], "", False]
    traffic.reduce("reload-problems", [msgpack.packb([ENVIRONMENT.digest, []])] * size, msgpack.packb(named), call)
    accepted = msgpack.packb(["", committed, Epoch(deployment=DEPLOYMENT).digest, False, False])
    traffic.exchange("reload-accept", [accepted] * size, [None] * size, call)
    _read_by_hosts(traffic, size, len(value), hosts)
    return traffic, seconds  # all ranks take it apart at once


def _read_by_hosts(traffic: Traffic, size: int, nbytes: int, hosts: int | None = None) -> None:
    """The leader and one rank of each host read a value."""
    readers = 1 + (-(-size // HOST) if hosts is None else hosts)
    traffic.store_reads += readers
    traffic.store_bytes += readers * nbytes


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

    def delete_key(self, key: str) -> bool:
        self.requests += 1
        return bool(self._store.delete_key(key))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        values: list[bytes] = self._store.multi_get(keys)
        self.read += sum(map(len, values))
        return values


def run_processes(size: int, keys: int, phase: str) -> tuple[Traffic, float]:
    """(what passed through the rendezvous, seconds of the slowest rank's agreement) with real ranks."""
    with tempfile.TemporaryDirectory(prefix="moe-dist-scaling-") as folder:
        outcomes = run_ranks(_agree_on_a_rank, size, Path(folder), keys, phase, deadline=600.0)
    if failed := [f"rank {rank}: {outcome.error}: {outcome.message}" for rank, outcome in enumerate(outcomes) if outcome.error]:
        raise RuntimeError("; ".join(failed))
    seconds, said, read, requests = zip(*(outcome.value for outcome in outcomes), strict=True)
    return Traffic(list(said), list(read), sum(requests)), max(seconds)


def _agree_on_a_rank(rank: Rank, keys: int, phase: str) -> tuple[float, int, int, int]:
    """(seconds, bytes said, bytes read, requests), from the first word to the last digest."""
    cells, entries = _cells(keys), _entries(keys)
    held = {} if rank.index in cold_ranks(rank.size, phase) else {hit_digest(entry): entry for entry in entries}
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
        words = group.exchange("hits", pack_hits(mine), reads=wanted)
        held |= {hit_digest(entry): entry for sender in wanted for entry in unpack_hits(words[sender])}
    assert all(hit in held for cell in proposal.cells for hit in cell.hits)
    words = group.exchange("agree-2", _yes(proposal).to_bytes())
    answers = {word: Answer.from_bytes(word) for word in dict.fromkeys(words)}
    agree_plan(proposal, [answers[word] for word in words], group.names)
    group.exchange("decide", TABLE)
    seconds, counted = time.monotonic() - started, (store.said, store.read, store.requests)
    group.commit(TABLE.decode())
    group.close()
    return seconds, *counted


class _CountingFiles(FilesystemStore):
    """What is read from it, for the ranks of one host."""

    reads = nbytes = 0

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        self.reads, self.nbytes = self.reads + 1, self.nbytes + len(value or b"")
        return value


def reload_processes(size: int, keys: int) -> tuple[Traffic, float]:
    """(what passed through the rendezvous and the store, seconds of the slowest rank's reload) with real ranks of one host."""
    with tempfile.TemporaryDirectory(prefix="moe-dist-scaling-") as folder:
        table, value = epoch_of(keys)
        if not epoch.publish(FilesystemStore(f"{folder}/store"), table, value, [ENVIRONMENT.digest]):
            raise RuntimeError(f"{folder} takes no writes")
        outcomes = run_ranks(_reload_on_a_rank, size, Path(folder), keys, deadline=600.0)
    if failed := [f"rank {rank}: {outcome.error}: {outcome.message}" for rank, outcome in enumerate(outcomes) if outcome.error]:
        raise RuntimeError("; ".join(failed))
    seconds, said, read, requests, reads, nbytes = zip(*(outcome.value for outcome in outcomes), strict=True)
    return Traffic(list(said), list(read), sum(requests), sum(reads), sum(nbytes)), max(seconds)


def _reload_on_a_rank(rank: Rank, keys: int) -> tuple[float, int, int, int, int, int]:
    """(seconds, bytes said, bytes read, requests, values and bytes read from the store)."""
    rendezvous = _Counting(TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False))
    deadlines = {"progress_timeout": timedelta(seconds=300), "cap": timedelta(seconds=600)}
    group = RankGroup(rendezvous, rank.index, rank.size, **deadlines)  # type: ignore[arg-type]
    group._look_s = 60.0  # what looks around find would be counted
    store = _CountingFiles(rank.folder / "store")
    with Tuner(store=store, group=group, deployment=DEPLOYMENT, device="cpu") as tuner:
        with group.open_pass("start"):
            group.exchange("start", b"")
            group.commit("")
        rendezvous.said = rendezvous.read = rendezvous.requests = 0
        concluded: list[int] = []
        commit = group.commit

        def counted(table_digest: str) -> None:
            concluded[:] = rendezvous.said, rendezvous.read, rendezvous.requests
            commit(table_digest)

        group.commit = counted  # type: ignore[method-assign]
        started = time.monotonic()
        if not tuner.reload() or len(tuner.epoch.winners) != keys:
            raise RuntimeError("the epoch was not adopted")
        said, read, requests = concluded
        return time.monotonic() - started, said, read, requests, store.reads, store.nbytes
