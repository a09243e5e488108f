"""The words that the rooms of a pass share: its settings, how far it is, what a cell and the whole came to.

`tune_pass`, `rounds` and `apart` speak them; the tuner and whoever shows progress read them.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from moe_dist.distributed.symmetric import Arena
from moe_dist.stores.codec import encode_entry
from moe_dist.tuning.identity import Environment, Key
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import journal_key
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, Cell, Entry, Epoch, Operation, ProbeSpec, Tactic, Timed, canonical, pack
from moe_dist.tuning.search import Standing

BUDGET_ENDED = "the time budget ended before it was timed to the end"
NONE_WON = "no candidate won that ran on all ranks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSettings:
    """What the ranks of a pass must have been told alike; `SettingsDiffer` names the fields that are not."""

    policy: MeasurementPolicy
    strategy: str
    objective: str
    probe: ProbeSpec
    ladder: BucketLadder
    buckets: tuple[Bucket, ...]
    modes: tuple[str, ...]
    deployment: str
    budget: timedelta | None
    mixed_environments: bool
    measure: bool = True

    def agreed(self) -> dict[str, Any]:
        """Plain values under the names that an error shows."""
        plain: dict[str, Any] = {
            "policy": self.policy.kind, "rounds": self.policy.rounds, "sweeps": self.policy.sweeps,
            "window_us": self.policy.window / timedelta(microseconds=1), "strategy": self.strategy, "objective": self.objective,
            **{f"probe_{field.name}": getattr(self.probe, field.name) for field in dataclasses.fields(self.probe)}, "ladder": self.ladder.bounds, "buckets": tuple(bucket.high for bucket in self.buckets),
            "modes": self.modes, "deployment": self.deployment, "budget_s": self.budget.total_seconds() if self.budget is not None else None,
            "mixed_environments": self.mixed_environments, "measure": self.measure,
        }  # fmt: skip
        return {name: canonical(value) for name, value in plain.items()}

    def key(self, environment: Environment, cell: Cell) -> Key:
        """Where the winner of `cell` lies for ranks of `environment`."""
        return Key(environment=environment, cell=cell, policy=self.policy.kind, objective=self.objective, probe=self.probe)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What keeps a rank from running a tactic besides the operation's own reasons: of candidates, of stored entries and of an epoch alike.

    workspace_bytes: that a tactic may need; None: no limit. quarantined: by the journal, {journal key: reason}.
    """

    workspace_bytes: int | None
    quarantined: Mapping[str, str]

    @classmethod
    def of(cls, workspace_bytes: int | None, journal: Journal | None) -> Limits:
        return cls(workspace_bytes, journal.quarantined() if journal is not None else {})

    def why_not(self, operation: Operation, cell: Cell, tactic: Tactic) -> str | None:
        """Why this rank does not run `tactic` for `cell`; None: it may. The default is never quarantined: what runs where nothing wins."""
        if (reason := operation.why_not(tactic, cell.bucket)) is not None:
            return reason
        if self.workspace_bytes is not None:
            needed = operation.workspace(tactic, cell.bucket.high).nbytes
            if needed > self.workspace_bytes:
                return f"needs {needed} bytes of workspace; the limit is {self.workspace_bytes}"
        if self.quarantined and tactic != operation.default(cell.bucket, cell.mode):
            return self.quarantined.get(journal_key(cell, tactic))
        return None


@dataclasses.dataclass(frozen=True)
class ProgressEvent:
    """How far a pass is. phase: "agree", "compile", "measure", "decide", "commit" or "done"; cells: those to time, and how many are done."""

    phase: str
    done: int = 0
    cells: int = 0
    cell: Cell | None = None


@dataclasses.dataclass(frozen=True)
class Decided:
    """What the measuring of one cell came to. winner None: nothing could be timed to the end; the default serves, unmeasured.
    tried: candidates that were run to be timed."""

    cell: Cell
    default: Tactic
    winner: Standing | None
    default_standing: Standing | None
    rejected: tuple[tuple[Tactic, str], ...]
    tried: frozenset[Tactic]

    @property
    def why_untimed(self) -> str | None:
        """The same on all ranks; None: it has a winner."""
        if self.winner is not None:
            return None
        return BUDGET_ENDED if any(reason == BUDGET_ENDED for _, reason in self.rejected) else NONE_WON

    def entry(self, key: Key) -> bytes | None:
        """What is stored of it under `key`; None: it has no winner."""
        if self.winner is None:
            return None
        return encode_entry(
            Entry(
                key=pack(key.canonical()),
                tactic=self.winner.tactic,
                time=timed(self.winner),
                default=self.default,
                default_time=timed(self.default_standing) if self.default_standing else None,
                provenance={"host": platform.node(), "pid": str(os.getpid()), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
            )
        )


@dataclasses.dataclass(frozen=True)
class PassOutcome:
    """epoch: the table to serve from; arena: the symmetric memory that its tactics need. keys: the key digest of each cell of the plan.
    untimed: why those that were to be timed have no winner.

    stored: the leader's store holds this epoch already. measured: candidates that were run to be timed, of strategy "reload" by this rank; hits: cells served from entries; compiled: kernels, ahead of the timing.
    """

    epoch: Epoch
    cells: tuple[Cell, ...]
    keys: Mapping[Cell, str]
    untimed: Mapping[Cell, str]
    measured: int
    hits: int
    rejected: tuple[tuple[Cell, Tactic, str], ...]
    entries: Mapping[Cell, bytes]
    stored: bool
    arena: Arena | None = None
    compiled: int = 0


def timed(standing: Standing) -> Timed:
    return Timed(standing.median_us, standing.spread_us, standing.rounds)
