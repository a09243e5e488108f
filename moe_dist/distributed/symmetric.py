"""Symmetric memory of ranks on one host: an arena that a group reserves together, with steps whose waits always end.

Owns the layout of the arena, its reservation and the words through which ranks meet in it. Knows no tactic: an operation lays
its scratch out in views, and the pass says how many bytes. The file in /dev/shm loses its name as soon as all ranks have
mapped it, so that nothing stays behind, however its ranks end from then on. Before, whichever rank lives on takes it away: only ranks
that are all killed within the reservation leave it, under a name that nobody uses again.

    line 0 | line 1 | ... | data of rank 0 | data of rank 1 | ...        a line and the data of a rank: written as said below
    a line: [sequence, what] of even steps, [sequence, what] of odd steps, generation of an error, its culprits as bits

Each word has one writer, the line's rank, so there is no lock that a dead rank could hold. The data of a rank may be written by
its peers, between steps that keep them apart. A rank publishes `what` before `sequence`, and data before both: readers that see
the sequence see the rest, which takes a processor that keeps the order of stores (x86-64).
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import platform
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import torch

from moe_dist.distributed.group import RankGroup
from moe_dist.errors import CallsDiffer, GroupError, RankLost

FOLDER = Path("/dev/shm")
MAX_RANKS = 62  # the bits of one word name the culprits
_LINE = 64  # bytes of a cache line: ranks that write their own do not slow each other
_WORDS = _LINE // 8
_ERROR, _CULPRITS = 4, 5  # places in a line
_STEP_BITS = 40  # a generation has room for ten years of steps
_SPINS = 500  # yields before a wait begins to sleep
_SLEEP_S = 0.0001


def why_no_arena(size: int) -> str | None:
    """Why ranks on this host can't have an arena; None: they can."""
    if not FOLDER.is_dir():
        return f"there is no {FOLDER} on this host"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory needs a processor that keeps the order of stores (x86-64), not {platform.machine()}"
    return f"an arena has room for {MAX_RANKS} ranks, not {size}" if size > MAX_RANKS else None


class Arena:
    """Shared memory that every rank of a group has mapped; all ranks take the same steps in it, in the same order.

    names: the global rank of each, for errors. nbytes: what each rank's data has room for.
    """

    def __init__(self, fd: int, rank: int, names: Sequence[int], nbytes: int) -> None:
        self.rank, self.names, self.nbytes = rank, tuple(names), nbytes
        self._map = mmap.mmap(fd, _total(len(names), nbytes))
        self._words = memoryview(self._map)[: len(names) * _LINE].cast("q")
        self._peers = [peer * _WORDS for peer in range(len(names)) if peer != rank]
        self._mine = rank * _WORDS
        self._generation = 0
        self.failed: GroupError | None = None
        self.restart()

    @property
    def size(self) -> int:
        return len(self.names)

    def data(self, rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A flat view of the first `count` elements of `rank`'s data."""
        assert count * dtype.itemsize <= self.nbytes, f"{count} x {dtype} exceed the {self.nbytes} bytes reserved"
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=_offset(self.size, self.nbytes, rank))

    def restart(self) -> None:
        """Forget steps and errors. All ranks call it alike, none inside a step: they have met elsewhere."""
        self._generation += 1
        self._start = self._sequence = self._generation << _STEP_BITS
        self.failed = None

    def post(self, what: str) -> None:
        """Say that this rank has reached its next step, in the call that `what` describes: which tactic, what shape, how far.

        Two steps are never posted without a `wait` between them. Nothing waits here.
        """
        self._sequence += 1
        slot = self._mine + self._sequence % 2 * 2
        self._words[slot + 1] = zlib.crc32(what.encode())
        self._words[slot] = self._sequence

    def wait(self, what: str, patience_s: float) -> None:
        """Until every rank has reached the step that this one has posted last.

        RankLost: ranks did not, for `patience_s`, or a peer concluded so first; all that wait name the same. CallsDiffer: they
        reached this step in another call. After either the arena serves nothing until `restart`.
        """
        if self.failed is not None:
            raise self.failed
        if self._sequence == self._start:
            return  # nothing was posted yet
        words, sequence, slot = self._words, self._sequence, self._sequence % 2 * 2
        deadline, spins = time.monotonic() + patience_s, 0
        # A rank that is ahead has posted one step more at most, in the other slot: it can't pass that one without this rank.
        while any(words[peer + slot] < sequence for peer in self._peers):
            self._raise_told(what)
            if time.monotonic() > deadline:
                missing = [peer // _WORDS for peer in self._peers if words[peer + slot] < sequence]
                self._lose(missing, what, f"not there after {patience_s:g} s")
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
        whats = [words[rank * _WORDS + slot + 1] for rank in range(self.size)]
        if len(set(whats)) > 1:
            usual = max(whats, key=whats.count)  # the first of equally many: the same on every rank
            self._differ([rank for rank, said in enumerate(whats) if said != usual], what)

    def leave(self) -> None:
        """This rank makes no more calls: peers that wait for it, now or later, raise `RankLost` at once."""
        self._words[self._mine + _CULPRITS] = 1 << self.rank
        self._words[self._mine + _ERROR] = self._generation

    def _raise_told(self, what: str) -> None:
        """Raise what a peer has concluded while this rank waits."""
        for peer in self._peers:
            if self._words[peer + _ERROR] == self._generation:
                bits = self._words[peer + _CULPRITS]
                self._lose([rank for rank in range(self.size) if bits >> rank & 1], what, f"said rank {self.names[peer // _WORDS]}")

    def _lose(self, ranks: Sequence[int], what: str, why: str) -> None:
        self._words[self._mine + _CULPRITS] = sum(1 << rank for rank in ranks)
        self._words[self._mine + _ERROR] = self._generation
        names, listed = self._named(ranks)
        self.failed = RankLost(f"rank {listed} lost in {what}: {why}", names)
        raise self.failed

    def _differ(self, ranks: Sequence[int], what: str) -> None:
        names, listed = self._named(ranks)
        self.failed = CallsDiffer(
            f"rank {listed} made another call than the rest (rank {self.names[self.rank]}: {what}); "
            "all ranks must serve one epoch and give equal group_tokens",
            names,
        )
        raise self.failed

    def _named(self, ranks: Sequence[int]) -> tuple[list[int], str]:
        names = [self.names[rank] for rank in ranks]
        return names, ", ".join(map(str, names))


@dataclasses.dataclass(frozen=True)
class Refused:
    """No arena, and why. ranks: the global ranks that could not have it."""

    reason: str
    ranks: tuple[int, ...]


def reserve(group: RankGroup, step: str, nbytes: int, held: Arena | None = None) -> Arena | Refused | None:
    """An arena with room for the largest `nbytes` that a rank of `group` asks for; None: all ask for 0, and none holds one.

    Three exchanges, whatever happens: bytes; the leader has made it; all have mapped it. held: the arena that this rank has,
    kept where it is large enough on every rank, since captured graphs may hold its addresses.
    """
    room = held.nbytes if held is not None and held.failed is None else 0
    name = f"moe_dist-{secrets.token_hex(8)}"
    asked = [msgpack.unpackb(word) for word in group.exchange(f"{step}-bytes", msgpack.packb([nbytes, room, name]))]
    wanted = max(needed for needed, _, _ in asked)
    keep = wanted <= min(room for _, room, _ in asked)
    path = FOLDER / asked[0][2]
    try:
        made = _attempt(lambda: _make(path, _total(group.size, wanted))) if group.is_leader and not keep else None
        refused = group.exchange(f"{step}-made", (made or "").encode())[0].decode()
        arena: list[Arena] = []
        mapped = _attempt(lambda: arena.append(_open(path, group, wanted))) if not keep and not refused else None
        answers = [word.decode() for word in group.exchange(f"{step}-mapped", (refused if group.is_leader else mapped or "").encode())]
    finally:
        if not keep:  # nobody needs the name any more; after an error anybody may take it away
            path.unlink(missing_ok=True)
    reasons = {rank: said for rank, said in zip(group.names, answers, strict=True) if said}
    if reasons:
        listing = "; ".join(f"rank {rank}: {said}" for rank, said in reasons.items())
        return Refused(f"{wanted} bytes of symmetric memory a rank could not be reserved: {listing}", tuple(reasons))
    return held if keep else arena[0]


def _attempt(action: Callable[[], object]) -> str | None:
    """Why `action` could not be done, or None."""
    try:
        action()
    except (OSError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _make(path: Path, nbytes: int) -> None:
    """A file whose pages are there: a page that is found missing at its first use ends the process."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def _open(path: Path, group: RankGroup, nbytes: int) -> Arena:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return Arena(fd, group.rank, group.names, nbytes)
    finally:
        os.close(fd)


def _offset(size: int, nbytes: int, rank: int) -> int:
    """Where the data of `rank` begins: on a page of its own."""
    page = mmap.PAGESIZE
    return -(-size * _LINE // page) * page + rank * (-(-nbytes // page) * page)


def _total(size: int, nbytes: int) -> int:
    return _offset(size, nbytes, size)
