"""The words that tuning shares: problem, tactic, bucket, measurement, entry, and the interface of an operation.

A leaf: search, measure, identity, stores and distributed all speak these types and none of those imports another.
Nothing here knows MoE, a store, a clock or a rank.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgpack
import torch

from moe_dist.errors import ConfigError

MODES = ("eager", "cuda_graph")
SEEDS = 1 << 32  # of which every draw still has a seed that torch takes


def modes_on(device_type: str) -> tuple[str, ...]:
    """How a call can be executed there: graphs exist on CUDA devices alone."""
    return MODES if device_type == "cuda" else MODES[:1]


Scalar = str | int | float | bool | None
_SCALARS = {str, int, float, bool, type(None)}


def canonical(value: Any) -> Any:
    """Plain, ordered, hashable form of `value`. Fails closed: TypeError on any type that has no stable meaning in a key."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, (tuple, list)):
        return tuple([canonical(item) for item in value])
    if isinstance(value, Mapping):
        if not all(type(name) is str for name in value):
            raise TypeError(f"a key's field names must be strings, not {sorted(map(repr, value))}")
        return tuple((name, canonical(value[name])) for name in sorted(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, canonical({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}))
    raise TypeError(f"{type(value).__name__} can't be part of a key: {value!r}")


def pack(value: Any) -> bytes:
    """msgpack bytes of the canonical form: equal values, equal bytes."""
    packed: bytes = msgpack.packb(canonical(value), use_bin_type=True)
    return packed


def unpack(packed: bytes) -> Any:
    """The canonical form that `pack` packed; ValueError: these bytes are no packed canonical form."""
    value = msgpack.unpackb(packed, use_list=False, strict_map_key=True, max_ext_len=0)
    if msgpack.packb(value, use_bin_type=True) != packed:
        raise ValueError("not packed in canonical form")
    return value


def _is_canonical(value: Any) -> bool:
    """Whether unpacked `value` is its own canonical form: no map or bytes in it."""
    items = [value]
    for item in items:
        if type(item) is tuple:
            items += item
        elif type(item) not in _SCALARS:
            return False
    return True


def digest(value: Any) -> str:
    """32 hex digits of SHA-256 over `pack(value)` (or over bytes as they are)."""
    return hashlib.sha256(value if isinstance(value, bytes) else pack(value)).hexdigest()[:32]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Everything that fixes the work except the token count; the same on every rank of a group. Equal where its bytes are.

    operation: the operation's registered name. fields: canonical pairs (see `Problem.of`).
    """

    operation: str
    fields: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, operation: str, **fields: Any) -> Problem:
        """TypeError: a field has no canonical form."""
        return cls(operation, canonical(fields))

    @functools.cached_property
    def packed(self) -> bytes:
        """`pack` of this problem, computed once: a table of a thousand cells has few problems."""
        return pack(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Problem) and self.packed == other.packed)

    def __hash__(self) -> int:
        return hash(self.packed)  # bytes keep theirs; that of nested fields would be computed at each look into a table

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def from_packed(cls, packed: bytes) -> Problem:
        """ValueError or TypeError: not the `packed` of a problem. Those of the last epoch are mostly those of the next: kept."""
        value = unpack(packed)
        name, ((fields_label, fields), (operation_label, operation)) = value
        if name != cls.__name__ or type(operation) is not str or type(fields) is not tuple:
            raise TypeError(f"not a problem: {name!r}")
        if not _is_canonical(value) or (fields_label, operation_label) != ("fields", "operation"):
            raise ValueError("not the bytes that packing its problem gives")
        problem = cls(operation, fields)
        problem.__dict__["packed"] = packed  # what packing it would give
        return problem


@dataclasses.dataclass(frozen=True)
class Tactic:
    """Backend name and named parameters: self-describing, never an index into a list that can change.

    collective: running it talks to peers.
    """

    backend: str
    params: tuple[tuple[str, Scalar], ...] = ()
    collective: bool = False

    @classmethod
    def of(cls, backend: str, *, collective: bool = False, **params: Scalar) -> Tactic:
        return cls(backend, tuple(sorted(params.items())), collective)

    def __getitem__(self, name: str) -> Scalar:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(name)

    def __str__(self) -> str:
        inner = ",".join(f"{name}={value}" for name, value in self.params)
        return f"{self.backend}({inner})" if inner else self.backend

    def to_plain(self) -> list[Any]:
        return [self.backend, [list(pair) for pair in self.params], self.collective]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Tactic:
        """TypeError or ValueError: not what `to_plain` gives, or a parameter that is no finite number."""
        backend, params, collective = plain
        pairs = tuple([(name, value) for name, value in params])
        names = [name for name, _ in pairs]
        kinds, of_names = {type(value) for _, value in pairs}, {type(name) for name in names}
        if type(backend) is not str or type(collective) is not bool or not of_names <= {str} or not kinds <= _SCALARS:
            raise TypeError(f"not a tactic: {plain!r}")
        if names != sorted(set(names)):
            raise ValueError(f"a tactic's parameters must be sorted, and each there once: {plain!r}")
        if float in kinds and not all(math.isfinite(value) for _, value in pairs if type(value) is float):
            raise ValueError(f"a tactic has a parameter that is no number: {plain!r}")
        return cls(backend, pairs, collective)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Token counts `low` to `high`, both included, that share a winner; measured at `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.high) if self.low == self.high else f"{self.low}-{self.high}"

    def outside(self, other: Bucket) -> list[Bucket]:
        """What of it lies below and above `other`."""
        if other.high < self.low or self.high < other.low:
            return [self]
        parts = (self.low, min(self.high, other.low - 1)), (max(self.low, other.high + 1), self.high)
        return [Bucket(low, high) for low, high in parts if low <= high]


@dataclasses.dataclass(frozen=True)
class BucketLadder:
    """The one rule from token count to bucket, for tuner, layer and plugins: a bucket ends at each of `bounds`."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if (
            not self.bounds
            or any(type(bound) is not int or bound < 1 for bound in self.bounds)
            or list(self.bounds) != sorted(set(self.bounds))
        ):
            raise ConfigError(f"bucket bounds {self.bounds} must be distinct positive integers in rising order")

    @classmethod
    def powers_of_two(cls, max_num_tokens: int) -> BucketLadder:
        """1, 2, 4, ... and `max_num_tokens` itself."""
        if max_num_tokens < 1:
            raise ConfigError(f"the largest tuned token count is {max_num_tokens}; it must be at least 1")
        bounds = [1 << power for power in range(max_num_tokens.bit_length()) if 1 << power < max_num_tokens]
        return cls((*bounds, max_num_tokens))

    @property
    def max_num_tokens(self) -> int:
        return self.bounds[-1]

    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(Bucket(low + 1, high) for low, high in zip((0, *self.bounds), self.bounds, strict=False))

    def bucket(self, num_tokens: int) -> Bucket | None:
        """The bucket of `num_tokens` >= 1; None beyond the ladder."""
        at = bisect.bisect_left(self.bounds, num_tokens)
        return Bucket((self.bounds[at - 1] if at else 0) + 1, self.bounds[at]) if at < len(self.bounds) else None


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Scratch memory that a tactic needs: a pure function of problem and token count. symmetric: the same on every rank, peer-mapped."""

    nbytes: int = 0
    alignment: int = 256
    symmetric: bool = False


@dataclasses.dataclass(frozen=True)
class Timed:
    """A measured time: median and spread (half of the range), in microseconds, over `samples` windows."""

    median_us: float
    spread_us: float
    samples: int


@dataclasses.dataclass(frozen=True)
class Failed:
    """The candidate can't be used here, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Abstain:
    """This rank has no such problem: it does not count."""


Measurement = Timed | Failed | Abstain


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored winner under its key. Stores publish its bytes (`stores.codec`); a plan decides whether it is taken.

    key: `pack` of the key's canonical form, opaque here. time, default_time: what the winner and the default took; None: the default could not be timed.
    provenance: who measured and when (host, pid, time, release), for people: no decision reads it.
    """

    key: bytes
    tactic: Tactic
    time: Timed
    default: Tactic
    default_time: Timed | None
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key_digest(self) -> str:
        """Equal to `digest` of the key's canonical form."""
        return digest(self.key)


@dataclasses.dataclass(frozen=True)
class ProbeSpec:
    """How probe inputs route tokens: a named distribution, seeded; part of the key.

    routing: "uniform", "zipf" (exponent `skew`), or "counts" (`counts[e]`: recorded tokens of expert e).
    seed: from 0 to `SEEDS` - 1. copies: input sets that rotate, so that the L2 cache serves nothing it would not serve in production.
    """

    routing: str = "uniform"
    skew: float = 1.0
    counts: tuple[int, ...] = ()
    seed: int = 0
    copies: int = 4

    def __post_init__(self) -> None:
        if self.routing not in ("uniform", "zipf", "counts"):
            raise ConfigError(f"probe routing is {self.routing!r}; choose uniform, zipf or counts")
        if (self.routing == "counts") != bool(self.counts):
            raise ConfigError(f"probe routing {self.routing!r} with {len(self.counts)} counts; give counts with routing='counts' alone")
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"the seed of probes is {self.seed}; choose one from 0 to {SEEDS - 1}")
        if self.copies < 1:
            raise ConfigError(f"probe copies is {self.copies}; it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileAhead:
    """How to compile candidates before they are timed.

    rank, ranks: this one of the group; ranks that compile the same share the work where they share a cache.
    deadline: `time.monotonic` at which to stop; None: no limit. progress: to be called while it goes on.
    """

    rank: int = 0
    ranks: int = 1
    deadline: float | None = None
    progress: Callable[[], None] = lambda: None


class Probe(Protocol):
    """Inputs, poisoned outputs and truth for one operation at one token count, on this rank's share."""

    copies: int

    def bind(self, tactic: Tactic) -> Callable[[int], Tactic]:
        """Prepare `tactic` (compile, lay out) and return `run(i)`: one serving call on input set i, which returns the
        tactic that was really executed. May raise: the candidate then fails with that reason."""

    def check(self, run: Callable[[int], Tactic]) -> str | None:
        """Poison every output, run each input set once, compare with the reference. The reason to reject, or None."""


class Operation(Protocol):
    """A kind of call that can be tuned, bound to this rank's share. The tuner knows this interface, not MoE."""

    problem: Problem
    device: torch.device

    def default(self, bucket: Bucket, mode: str) -> Tactic:
        """The tactic that runs untuned: a pure function of problem, bucket and mode."""

    def candidates(self, bucket: Bucket, mode: str) -> Iterable[Tactic]:
        """Tactics to consider; the tuner adds the default."""

    def why_not(self, tactic: Tactic, bucket: Bucket) -> str | None:
        """Why `tactic` can't serve every token count of `bucket` on this rank; None: it can."""

    def workspace(self, tactic: Tactic, num_tokens: int) -> Workspace: ...

    def probe(self, num_tokens: int, spec: ProbeSpec) -> Probe:
        """Raises MemoryError or torch.OutOfMemoryError when this rank can't hold it."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One decision: the winner of one problem in one mode and bucket."""

    problem: Problem
    mode: str
    bucket: Bucket

    def __str__(self) -> str:
        return f"{self.problem.operation}[{digest(self.problem)[:8]}] {self.mode} tokens {self.bucket}"


@dataclasses.dataclass(frozen=True)
class Winner:
    """What a cell is served by. default_us None: the default could not be timed.

    source: "tuned" in this pass, "hit" from a store, "epoch" adopted from a committed one.
    """

    tactic: Tactic
    tactic_us: float
    default: Tactic
    default_us: float | None
    source: str

    def to_plain(self) -> list[Any]:
        return [self.tactic.to_plain(), self.tactic_us, self.default.to_plain(), self.default_us, self.source]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Winner:
        tactic, tactic_us, default, default_us, source = plain
        return cls(
            Tactic.from_plain(tactic),
            float(tactic_us),
            Tactic.from_plain(default),
            None if default_us is None else float(default_us),
            str(source),
        )


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The winner table that a group serves from: the previous table plus the last pass's winners. A cell that is not in it runs its default.

    number rises by one with each committed pass of a deployment; 0 is the empty table before the first.
    """

    number: int = 0
    deployment: str = ""
    winners: Mapping[Cell, Winner] = dataclasses.field(default_factory=dict)

    def of(self, problem: Problem, mode: str) -> dict[Bucket, Winner]:
        """The winners of one problem in one mode, by bucket, rising."""
        found = {cell.bucket: winner for cell, winner in self.winners.items() if cell.problem == problem and cell.mode == mode}
        return dict(sorted(found.items()))

    def outside(self, cells: Iterable[Cell]) -> dict[Cell, Winner]:
        """The winners for what `cells` leave to them: where another ladder's bucket overlaps one of `cells`, the rest of it, so that
        each token count has one winner still."""
        taken: dict[tuple[bytes, str], list[Bucket]] = {}
        for cell in cells:
            taken.setdefault((cell.problem.packed, cell.mode), []).append(cell.bucket)
        left: dict[Cell, Winner] = {}
        for cell, winner in self.winners.items():
            parts = [cell.bucket]
            for bucket in taken.get((cell.problem.packed, cell.mode), ()):
                parts = [part for old in parts for part in old.outside(bucket)]
            left.update({dataclasses.replace(cell, bucket=part) if part != cell.bucket else cell: winner for part in parts})
        return left

    @functools.cached_property
    def digest(self) -> str:
        """Equal on all ranks exactly when they serve the same tactics for the same cells."""
        # Few problems and tactics, and many cells of them: each is packed once.
        problems = {packed: digest(packed) for packed in {cell.problem.packed for cell in self.winners}}
        used = {id(winner.tactic): winner.tactic for winner in self.winners.values()}
        tactics = {name: pack(tactic.to_plain()) for name, tactic in used.items()}
        rows = [
            (problems[cell.problem.packed], cell.mode, cell.bucket.low, cell.bucket.high, tactics[id(winner.tactic)])
            for cell, winner in self.winners.items()
        ]
        content: bytes = msgpack.packb([self.deployment, sorted(rows)], use_bin_type=True)
        return digest(content)
