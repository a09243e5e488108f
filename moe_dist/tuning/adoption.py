"""What it takes to serve a committed epoch: reading it, its symmetric memory, and the steps in which a group adopts one from the store.

A rank that starts later takes these steps with its own group alone, none with ranks that serve.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping

from moe_dist.distributed import converge, epoch
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused, reserve
from moe_dist.errors import PassAborted
from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, check_epoch, decode_epoch
from moe_dist.tuning.identity import Environment
from moe_dist.tuning.misses import differences, environment_of
from moe_dist.tuning.pins import Pins
from moe_dist.tuning.problem import Cell, Epoch, Operation, Problem, Tactic

log = logging.getLogger("moe_dist.tuning")


@dataclasses.dataclass(frozen=True)
class Committed:
    """An epoch as it lies in the store. entries: store key -> bytes, which are decoded when they are hit."""

    value: bytes
    epoch: Epoch
    entries: Mapping[str, bytes]


def read_committed(value: bytes, deployment: str) -> Committed | None:
    """None, logged with the reason: `value` is no epoch of `deployment`."""
    try:
        return Committed(value, *decode_epoch(value, deployment=deployment))
    except Malformed as error:
        log.warning("a stored epoch is passed over: %s", error)
        return None


def newest_committed(store: Store, deployment: str) -> Committed | None:
    """The newest epoch of `deployment` that can be read; None: there is none."""
    return epoch.newest(store, deployment, lambda value: read_committed(value, deployment))


def adopt_newest(
    group: RankGroup,
    store: Store,
    environment: Environment,
    records: Mapping[Problem, Operation],
    serving: Epoch,
    arena: Arena | None,
    pins: Pins,
) -> tuple[Committed | None, Arena | None]:
    """The epoch that all ranks of `group` adopt, the leader's newest of the deployment they serve, and the arena to serve with.

    None, said in the log: there is no such epoch, or a rank can't serve it, or has pins on another. PassAborted: a rank can't have the symmetric memory.
    """
    with group.open_pass("reload"):
        newest = _newest_whole(store, serving.deployment) if group.is_leader else None
        value = group.exchange("reload", newest or b"")[0]
        found = read_committed(value, serving.deployment) if value else None  # on all ranks at once
        missing = "it can't be read here" if value else "there is no committed epoch"
        held = pins.why_not_replace() if found and found.epoch.digest != serving.digest else None
        reason = (held or _why_not(found, environment, records)) if found else missing
        reasons = [word.decode() for word in group.exchange("reload-accept", (reason or "").encode())]
        refused = [f"rank {name}: {said}" for name, said in zip(group.names, reasons, strict=True) if said]
        table = found.epoch if found and not refused else serving
        digests = [word.decode() for word in group.exchange("decide", table.digest.encode())]
        converge.require_one_digest(digests, group.names, "epochs")
        if table is not serving and any(winner.tactic.collective or winner.default.collective for winner in table.winners.values()):
            arena = reserve_for(group, table, records, arena)
        group.commit(table.digest)
    if found is not None and refused:
        log.warning("the committed epoch is not adopted: %s", refused[0])
    return (found if not refused else None), arena


def _newest_whole(store: Store, deployment: str) -> bytes | None:
    def whole(value: bytes) -> bytes | None:
        try:
            check_epoch(value, deployment)
        except Malformed as error:
            log.warning("a stored epoch is passed over: %s", error)
            return None
        return value

    return epoch.newest(store, deployment, whole)


def _why_not(found: Committed, environment: Environment, records: Mapping[Problem, Operation]) -> str | None:
    """Why this rank can't serve the epoch; None: it can."""
    here = f"{environment.folder}/"
    for path, entry in found.entries.items():
        if path.startswith(here):
            continue
        try:
            return f"it was tuned in another environment: {differences(environment_of(entry), environment)}"
        except Malformed as error:
            return str(error)
    for cell, winner in found.epoch.winners.items():
        operation = records.get(cell.problem)
        if operation is not None and (reason := operation.why_not(winner.tactic, cell.bucket)) is not None:
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
