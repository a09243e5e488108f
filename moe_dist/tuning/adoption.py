"""What it takes to serve a committed epoch: reading it, its symmetric memory, and the steps in which a group adopts one from the store.

A rank that starts later takes these steps with its own group alone, none with ranks that serve.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import msgpack

from moe_dist.distributed import converge, epoch
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused, reserve
from moe_dist.errors import PassAborted
from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, decode_epoch
from moe_dist.tuning.identity import Environment
from moe_dist.tuning.misses import differences, environment_of
from moe_dist.tuning.pass_terms import Limits
from moe_dist.tuning.pins import Pins
from moe_dist.tuning.problem import Bucket, Cell, Epoch, Operation, Problem, Tactic, digest

log = logging.getLogger("moe_dist.tuning")

_NOTHING = "there is no committed epoch"


@dataclasses.dataclass(frozen=True, eq=False)
class Committed:
    """An epoch as it lies in the store. entries: store key -> bytes, which are decoded when they are hit. key: where it lies."""

    value: bytes
    epoch: Epoch
    entries: Mapping[str, bytes]
    key: str = ""

    @functools.cached_property
    def _digests(self) -> dict[bytes, str]:
        return {packed: digest(packed) for packed in {cell.problem.packed for cell in self.epoch.winners}}

    @functools.cached_property
    def problems(self) -> frozenset[str]:
        """Digests of the problems that its winners are of."""
        return frozenset(self._digests.values())

    @functools.cached_property
    def environments(self) -> frozenset[str]:
        """Digests of those that it has all its entries for: a group of mixed ones embeds as many for each."""
        entries = collections.Counter(path.rpartition("/")[0].rpartition("/")[2] for path in self.entries)
        return frozenset(environment for environment, count in entries.items() if count == max(entries.values()))

    def serves(self, environments: Iterable[str]) -> bool:
        """Whether it was tuned in all of `environments` (their digests). What has no entries is of no environment, and fits any."""
        return not self.entries or self.environments.issuperset(environments)

    def covers(self, problems: Collection[str], buckets: Collection[tuple[str, Bucket]]) -> int:
        """How many of `buckets` (mode, bucket), counted for each of `problems` (digests), it has winners for."""
        return sum(self._digests[cell.problem.packed] in problems and (cell.mode, cell.bucket) in buckets for cell in self.epoch.winners)

    def __str__(self) -> str:
        return f"epoch {self.epoch.number} of problems {_listed(self.problems)}"


def read_committed(value: bytes, deployment: str, key: str = "") -> Committed | None:
    """None, logged with the reason: `value` is no epoch of `deployment`."""
    try:
        return Committed(value, *decode_epoch(value, deployment=deployment), key)
    except Malformed as error:
        log.warning("a stored epoch is passed over: %s", error)
        return None


def choose_committed(
    store: Store,
    deployment: str,
    wanted: Collection[str] = (),
    environments: Collection[str] = (),
    buckets: Collection[tuple[str, Bucket]] = (),
    serving: Epoch | None = None,
    why_not: Callable[[Committed], str | None] = lambda found: None,
) -> tuple[Committed | None, str]:
    """The newest epoch of `deployment` that holds most of the problems `wanted` (their digests), and of those most of `buckets` (mode,
    bucket), since another job, or a run that was ended early, may have published fewer; none wanted: the newest.

    serving: the epoch in force here. One that is older is chosen only if it holds a problem wanted that this one lacks: it was superseded.
    why_not: the reason why an epoch can't be served here; such a one is chosen only where all are, so that the reason is said.

    environments: of the ranks that would serve it, by their digests. What was tuned in all of them goes before anything else, since
    replicas may have other GPUs, or be upgraded one after the other: one epoch is read of each set of cells tuned there, and where
    there is none a single one of the others, whose refusal says what differs.

    None: there is none, or the reason why none is chosen: groups that tune other problems may publish under one deployment, as the
    stages of a pipeline do, and an epoch of theirs would leave this group's layers to their defaults.
    """
    return _choose(_Published(store, deployment), wanted, environments, buckets, serving, why_not)


class _Published:
    """The epochs of `deployment` that lie in `store` at one look: listed once, and each value read once."""

    def __init__(self, store: Store, deployment: str) -> None:
        self._store, self.deployment = store, deployment
        self.names = epoch.published(store, deployment)
        self._values: dict[epoch.EpochName, bytes | None] = {}

    def value(self, name: epoch.EpochName) -> bytes | None:
        if name not in self._values:
            self._values[name] = self._store.get(name.key(self.deployment))
        return self._values[name]

    def read(self, name: epoch.EpochName) -> Committed | None:
        value = self.value(name)
        return read_committed(value, self.deployment, name.key(self.deployment)) if value is not None else None

    def only_one(self, environments: Collection[str]) -> epoch.EpochName | None:
        """The newest of those that may serve, where all are of the same cells; None: names alone do not tell which is chosen."""
        names = [name for name in self.names if name.may_serve(environments)]
        return names[0] if len({name.cells for name in names}) == 1 else None


def _choose(
    published: _Published,
    wanted: Collection[str],
    environments: Collection[str],
    buckets: Collection[tuple[str, Bucket]],
    serving: Epoch | None,
    why_not: Callable[[Committed], str | None],
) -> tuple[Committed | None, str]:
    """`choose_committed` of what was `published`."""
    names, deployment = published.names, published.deployment
    newest: dict[str, Committed] = {}  # of each set of cells
    elsewhere: Committed | None = None
    for name in names:
        if name.cells in newest or not name.may_serve(environments) or (found := published.read(name)) is None:
            continue
        if found.serves(environments):
            newest[name.cells] = found
        elsewhere = elsewhere or found
    if not newest:
        others = (published.read(name) for name in names if not name.may_serve(environments))
        elsewhere = elsewhere or next((found for found in others if found is not None), None)
        if elsewhere is None or not wanted or elsewhere.problems & set(wanted):
            return elsewhere, ""
        return None, f"deployment {deployment!r} has no epoch of this environment, and in another {elsewhere}"
    candidates = [found for found in newest.values() if found.problems] or list(newest.values())
    if not wanted:
        apart = [other for other in candidates[1:] if not other.problems & candidates[0].problems]
        if not apart:
            return candidates[0], ""
        return None, (
            f"groups that tune different problems have published under deployment {deployment!r}: {candidates[0]} and {apart[0]}; record "
            "this group's operations before it reloads, or give each group a deployment name of its own"
        )
    fitting = [found for found in candidates if found.problems & set(wanted)]
    if not fitting:
        lacks = f"deployment {deployment!r} has no epoch of the problems recorded or served here ({_listed(wanted)})"
        return None, f"{lacks}: it has {candidates[0]}"
    served = Committed(b"", serving or Epoch(), {})
    current = [found for found in fitting if found.epoch.number >= served.epoch.number or found.problems & set(wanted) - served.problems]
    if not current:
        older = f"the newest of deployment {deployment!r} is older: {fitting[0]}"
        return None, f"{served} is served here, and {older}; tune here, or open another tuner to take that over"
    ranked = sorted(current, key=lambda found: (-len(found.problems & set(wanted)), -found.covers(wanted, buckets), -found.epoch.number))
    chosen = next((found for found in ranked if why_not(found) is None), ranked[0])
    if chosen is not ranked[0]:
        log.warning("%s is passed over for %s: %s", ranked[0], chosen, why_not(ranked[0]))
    return chosen, ""


def adopt_newest(
    group: RankGroup,
    store: Store,
    environment: Environment,
    records: Mapping[Problem, Operation],
    serving: Epoch,
    arena: Arena | None,
    pins: Pins,
    buckets: Collection[tuple[str, Bucket]],
    limits: Limits,
) -> tuple[Committed | None, Arena | None]:
    """The epoch that all ranks of `group` adopt, the leader's choice among the deployment's that they serve, and the arena to serve with.

    buckets: (mode, bucket) of what is run here. limits: this rank's. The leader passes over what it would refuse itself; what another rank
    refuses none adopts, nor a second choice: a pass takes over what all can serve of it, cell by cell, and tunes the rest.

    None, said in the log: there is no such epoch, or a rank can't serve it, or has pins on another. PassAborted: a rank can't have the symmetric memory.
    """
    why_not = functools.cache(functools.partial(_why_not, environment=environment, records=records, limits=limits))
    decide: Callable[[], tuple[Committed | None, str]] | None = None  # the leader's, once it has looked into the store
    sought: set[str] = set()

    def name(words: list[bytes]) -> bytes:
        """The leader's part: it alone lists the store, and says what all read, or why nothing. Where the names leave one epoch it does not
        take that apart before: all ranks do so at once, and `accept` tells whether it is the choice."""
        nonlocal decide, sought
        asked = [msgpack.unpackb(word) for word in dict.fromkeys(words)]
        sought = {problem for _, problems in asked for problem in problems}
        environments, published = {there for there, _ in asked}, _Published(store, serving.deployment)
        decide = functools.cache(functools.partial(_choose, published, sought, environments, buckets, serving, why_not))
        only = published.only_one(environments)
        value = published.value(only) if only is not None and (only.number, only.table) != (serving.number, serving.digest) else None
        if only is not None and value is not None:
            named: bytes = msgpack.packb([only.key(serving.deployment), digest(value), [only.number, only.table, []], "", False])
            return named
        return choose([])

    def choose(words: list[bytes]) -> bytes:
        """The leader's choice, or why it chooses none."""
        assert decide is not None
        found, missing = decide()
        if found is None and not missing and serving.number:
            missing = f"deployment {serving.deployment!r} has no epoch any more; {Committed(b'', serving, {})} is served on"
        packed: bytes = msgpack.packb(
            [found.key, digest(found.value), [found.epoch.number, found.epoch.digest, sorted(found.environments)], "", False]
            if found
            else ["", "", [0, "", []], missing or _NOTHING, bool(missing and (not sought or serving.number))]
        )
        return packed

    def accept(said: Committed | None, missing: str, another: bool) -> list[tuple[str, str, str, bool, bool]]:
        held = pins.why_not_replace() if said and said.epoch.digest != serving.digest else None
        reason = (held or why_not(said) or "") if said else missing
        word = [reason, said.epoch.digest if said else "", serving.digest, bool(key) and said is None and not missing, another]
        return [msgpack.unpackb(answer) for answer in group.exchange("reload-accept", msgpack.packb(word))]

    with group.open_pass("reload"):
        here = {problem.packed for problem in records} | {cell.problem.packed for cell in serving.winners}
        own = msgpack.packb([environment.digest, sorted(digest(packed) for packed in here)])
        said = group.reduce("reload-problems", own, name)
        while True:
            key, wanted, (number, table_digest, environments), missing, doubtful = msgpack.unpackb(said)
            with epoch.HostCopy(store, key, wanted) as copy:
                found, _ = decide() if decide is not None else (None, "")
                another = group.is_leader and key != (found.key if found else "")
                served = (number, table_digest) == (serving.number, serving.digest) and environment.digest in environments
                if found is None and served:
                    found = Committed(b"", serving, {})  # there is nothing to read
                elif key and found is None and not another and (value := copy.read()) is not None:
                    found, missing = _read_here(value, serving.deployment)
                answers = accept(found, missing, another)
            if not answers[0][-1]:
                break
            said = group.reduce("reload-chosen", b"", choose)  # of what was named unread the value is none, or another is better
        if any(lacks for _, _, _, lacks, _ in answers):  # in another store than the leader's
            lacking = bool(key) and found is None and not missing
            value = group.exchange("reload-value", found.value if found and group.is_leader else b"", reads={0} if lacking else ())[0]
            if lacking:
                found, missing = _read_here(value, serving.deployment)
            answers = accept(found, missing, False)
        refused = [f"rank {name}: {against}" for name, (against, *_) in zip(group.names, answers, strict=True) if against]
        table = found.epoch if found and not refused else serving
        converge.require_one_digest([served if refused else chosen for _, chosen, served, *_ in answers], group.names, "epochs")
        if found and not refused and any(winner.tactic.collective or winner.default.collective for winner in table.winners.values()):
            arena = reserve_for(group, table, records, arena)
        group.commit(table.digest)
    if refused and missing != _NOTHING:
        # That others of the deployment have tuned other problems, and these not yet, is how every first tuning of a second model begins.
        level = logging.WARNING if key or doubtful else logging.INFO
        log.log(level, "the committed epoch is not adopted: %s", refused[0])
    return (found if not refused else None), arena


def _read_here(value: bytes, deployment: str) -> tuple[Committed | None, str]:
    found = read_committed(value, deployment)
    return found, "" if found else "it can't be read here"


def _listed(problems: Collection[str]) -> str:
    return ", ".join(problem[:8] for problem in sorted(problems)[:3]) + (" ..." if len(problems) > 3 else "")


def _tuned_elsewhere(found: Committed, environment: Environment) -> str | None:
    """How the environment that the epoch was tuned in differs from this one; None: it was tuned in this one, too."""
    if found.serves([environment.digest]):
        return None
    try:
        return f"it was tuned in another environment: {differences(environment_of(next(iter(found.entries.values()))), environment)}"
    except Malformed as error:
        return str(error)


def _why_not(found: Committed, environment: Environment, records: Mapping[Problem, Operation], limits: Limits) -> str | None:
    """Why this rank can't serve the epoch; None: it can."""
    if (reason := _tuned_elsewhere(found, environment)) is not None:
        return reason
    for cell, winner in found.epoch.winners.items():
        operation = records.get(cell.problem)
        if operation is not None and (reason := limits.why_not(operation, cell, winner.tactic)) is not None:
            return f"{cell}: {winner.tactic}: {reason}"
    return None


def reserve_for(group: RankGroup, table: Epoch, records: Mapping[Problem, Operation], held: Arena | None) -> Arena | None:
    """The symmetric memory of `table`, at the maximum over its tactics. PassAborted, on every rank alike: a rank can't have it."""
    tactics = [(cell, tactic) for cell, winner in table.winners.items() for tactic in (winner.tactic, winner.default)]
    got = reserve(group, "reserve", symmetric_bytes(tactics, records), held)
    if isinstance(got, Refused):
        raise PassAborted(f"{got.reason}; the pass is aborted, nothing changed", got.ranks)
    return got


def symmetric_bytes(tactics: Iterable[tuple[Cell, Tactic]], records: Mapping[Problem, Operation]) -> int:
    """The most that one of `tactics` needs of a rank's symmetric memory, as far as this rank has their problems."""
    asked = [records[cell.problem].workspace(tactic, cell.bucket.high) for cell, tactic in tactics if cell.problem in records]
    return max((workspace.nbytes for workspace in asked if workspace.symmetric), default=0)
