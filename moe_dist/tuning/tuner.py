"""The tuner: what one process holds of tuning. It composes; passes, stores, groups and clocks do the work.

A `Tuner` is a value that is passed in: two may live side by side, and nothing here is global. Outside a pass nothing is
measured and nothing is said to other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from moe_dist.config import DEFAULT_MAX_NUM_TOKENS
from moe_dist.distributed.epoch import Publications
from moe_dist.distributed.group import CAP, PROGRESS_TIMEOUT, RankGroup
from moe_dist.distributed.symmetric import Arena
from moe_dist.errors import ConfigError, PassAborted, RendezvousLost, TunerStateError, first_line
from moe_dist.settings import job_settings
from moe_dist.stores.base import Store, reporting
from moe_dist.stores.open import open_store
from moe_dist.tuning.adoption import adopt_newest
from moe_dist.tuning.identity import Environment, build_environment
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.misses import why_nothing_fits
from moe_dist.tuning.pass_terms import Limits, PassOutcome, PassSettings, ProgressEvent
from moe_dist.tuning.pins import Pin, Pins
from moe_dist.tuning.policy import OBJECTIVES, STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, Cell, Epoch, Operation, ProbeSpec, Problem, Tactic, Winner
from moe_dist.tuning.tune_pass import TunePass

log = logging.getLogger("moe_dist.tuning")

DEFAULT_LADDER = BucketLadder.powers_of_two(DEFAULT_MAX_NUM_TOKENS)


@dataclasses.dataclass(frozen=True)
class Row:
    """One cell of a report. winner None: the default serves; untimed: why, if it was to be timed (`BUDGET_ENDED`, or what failed)."""

    cell: Cell
    key: str
    winner: Winner | None
    untimed: str | None = None


@dataclasses.dataclass(frozen=True)
class PassReport:
    """What a pass came to. measured: candidates that were run to be timed; hits: cells served from stored entries; rejected: (cell, tactic, reason);
    compiled: kernels compiled by this rank ahead of the timing."""

    rows: tuple[Row, ...]
    measured: int
    hits: int
    rejected: tuple[tuple[Cell, Tactic, str], ...]
    seconds: float
    strategy: str
    epoch: int
    digest: str
    compiled: int = 0


class Tuner:
    """Tunes recorded operations, alone or with a group of ranks, and holds the epoch that layers serve from.

    store: an open `Store`, or a URL or folder for `open_store`. policy: how time is taken.
    group: a torch.distributed ProcessGroup or a `RankGroup`; None: alone. All ranks of a group give equal settings.
    strategy: "reduce", "shard" or "reload"; objective: "max" or "mean" over ranks. ladder: the buckets.
    budget: how long measuring may take in one pass; None: no limit. deployment: whose epochs these are; groups that
        tune other problems may share it, since a joiner adopts the newest that holds its problems.
    device: whose environment keys the results; None: the CUDA device if there is one, else the CPU.
    versions: of foreign backends in the pool, part of the environment. workspace_limit: bytes a tactic may need.
    mixed_environments: ranks may differ in environment (GPU, driver, libraries): what they tune together, or each apart by "reload", all
        serve, and it is stored for each environment. Never in moe_dist's own code, by which they read each other's words.
    progress_timeout, cap: when a rank counts as lost. journal: where crashes are remembered; None: beside a local store, else nowhere.

    ConfigError: a value is out of range, or the policy has no meaning on the device. StoreError: no such store.
    """

    def __init__(
        self,
        *,
        store: Store | str = "memory:",
        policy: MeasurementPolicy | None = None,
        group: dist.ProcessGroup | RankGroup | None = None,
        strategy: str = "reduce",
        objective: str = "max",
        ladder: BucketLadder = DEFAULT_LADDER,
        probe: ProbeSpec | None = None,
        budget: timedelta | None = None,
        deployment: str = "default",
        device: torch.device | str | None = None,
        versions: Mapping[str, str] | None = None,
        workspace_limit: int | None = None,
        mixed_environments: bool = False,
        progress_timeout: timedelta = PROGRESS_TIMEOUT,
        cap: timedelta = CAP,
        journal: Path | str | None = None,
        on_progress: Callable[[ProgressEvent], None] | None = None,
    ) -> None:
        for name, value, allowed in (("strategy", strategy, STRATEGIES), ("objective", objective, OBJECTIVES)):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if budget is not None and budget <= timedelta(0):
            raise ConfigError(f"budget is {budget}; it must be above 0, or None for no limit")
        self.device = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device is {str(self.device)!r}, but torch sees no CUDA device in this process; use 'cpu'")
        self.policy = policy or MeasurementPolicy()
        self.ladder = ladder
        self.policy.modes(self.device.type)  # raises where the device has no such mode
        self.environment: Environment = build_environment(self.device, versions)
        self.epoch = Epoch(deployment=deployment)
        self.arena: Arena | None = None  # the symmetric memory of the epoch's tactics
        self.pins = Pins()  # on both of them
        self._owns_store = isinstance(store, str)
        self.store: Store = open_store(store) if isinstance(store, str) else store
        self._strategy, self._objective, self._budget, self._deployment = strategy, objective, budget, deployment
        self._probe = probe or ProbeSpec()
        self._workspace_limit, self._mixed = workspace_limit, mixed_environments
        folder = journal if journal is not None else getattr(self.store, "journal_folder", None)
        self._journal = Journal(folder, self.environment.digest) if folder is not None else None
        self._on_progress = on_progress or (lambda event: None)
        self._records: dict[Problem, Operation] = {}
        self._memory: dict[str, bytes] = {}
        self._published = Publications()
        self._explained = False
        self._closed = False
        # Last, so that nothing can fail once the ranks are claimed.
        self._group = _rank_group(group, progress_timeout, cap)

    @property
    def group(self) -> RankGroup:
        return self._group

    @property
    def limits(self) -> Limits:
        """What keeps this rank from running a tactic besides the operation's own reasons, as the journal has it now."""
        return Limits.of(self._workspace_limit, self._journal)

    def record(self, operation: Operation) -> None:
        """Remember an operation for the passes to come; the first of equal problems is kept. Measures nothing."""
        self._records.setdefault(operation.problem, operation)

    def run_pass(
        self,
        buckets: Sequence[Bucket] | None = None,
        *,
        policy: MeasurementPolicy | None = None,
        measure: bool = True,
        ahead: Sequence[Bucket] = (),
        publish: bool = True,
    ) -> PassReport:
        """Agree, measure, decide, commit for everything recorded on any rank; all ranks of the group call it alike.

        buckets: a part of the ladder; None: all of it. policy: of this pass; None: the tuner's. measure False: cells whose
        entry every rank accepts are served, the rest keep what they have, and nothing is timed or stored. ahead: buckets of passes
        to come: their candidates are compiled along with this pass's, in parallel. publish False: more passes complete the epoch, so
        a joiner is not shown this one; its entries are stored all the same.
        On return the new epoch is served. On any of these the previous one is: SettingsDiffer, NothingRunnable, RankLost,
        RankWithdrawn, PassAborted (a pin on any rank is a reason), RendezvousLost; TunerStateError when misused. An error of the
        store's or the callback's own after the commit propagates with the new epoch served, as on the other ranks.
        """
        self._require_usable()
        chosen = tuple(self.ladder.buckets() if buckets is None else buckets)
        if unknown := [bucket for bucket in chosen if bucket not in self.ladder.buckets()]:
            raise ConfigError(f"bucket {unknown[0]} is not in the ladder {self.ladder.bounds}")
        started = time.monotonic()
        if (reason := self.pins.why_not_replace()) is not None:
            name = self._group.names[self._group.rank]
            with self._group.open_pass("run_pass"):  # all ranks raise it
                raise PassAborted(f"rank {name}: {reason}", [name])
        policy = policy or self.policy
        settings = PassSettings(
            policy=policy, strategy=self._strategy, objective=self._objective, probe=self._probe, ladder=self.ladder, buckets=chosen,
            modes=policy.modes(self.device.type), deployment=self._deployment, budget=self._budget, mixed_environments=self._mixed,
            measure=measure,
        )  # fmt: skip
        tune_pass = TunePass(
            settings, self._group, self.environment, self._records, self.store, serving=self.epoch, arena=self.arena, memory=self._memory,
            journal=self._journal, workspace_limit=self._workspace_limit, on_progress=self._on_progress, adopt=self._adopt_outcome, ahead=ahead,
            published=self._published if publish else None, explain=self._explain,
        )  # fmt: skip
        with reporting(self.store, self._store_goes_on):
            outcome = tune_pass.run()
        return PassReport(
            rows=tuple(Row(cell, outcome.keys[cell], outcome.epoch.winners.get(cell), outcome.untimed.get(cell)) for cell in outcome.cells),
            measured=outcome.measured,
            hits=outcome.hits,
            rejected=outcome.rejected,
            compiled=outcome.compiled,
            seconds=time.monotonic() - started,
            strategy=self._strategy,
            epoch=outcome.epoch.number,
            digest=outcome.epoch.digest,
        )

    def reload(self) -> bool:
        """Adopt the deployment's newest committed epoch from the store: of the problems recorded or served here (among several, the
        one that has most of this ladder), of any where there are none. In a group all ranks call it and adopt the leader's.

        An epoch that is older than the one served is adopted only if it has a problem recorded here that this one lacks. The leader
        passes over an epoch that it would refuse for a reason of its own.

        True: adopted, or served already. False: there is none, or it can't be told which, or a rank refuses it (its environment differs, it
        is pinned to another epoch; a backend, its workspace limit or its journal objects to a winner, as in a pass), said in the log.
        Winners are judged, and symmetric memory is reserved, for the operations recorded so far; of one that comes later a winner that is
        refused is left out where it is bound to serve. PassAborted: a rank can't have that memory.
        """
        self._require_usable()
        run = {(mode, bucket) for mode in self.policy.modes(self.device.type) for bucket in self.ladder.buckets()}
        with reporting(self.store, self._store_goes_on):
            found, self.arena = adopt_newest(
                self._group, self.store, self.environment, self._records, self.epoch, self.arena, self.pins, run, self.limits
            )
        if found is None:
            return False
        self._memory.update(found.entries)
        self.epoch = found.epoch
        return True

    def pin(self) -> Pin:
        """Keep the epoch and its symmetric memory in force until the pin is released, or its `with` block ends: until then a
        `reload` of another epoch is refused on all ranks, and a pass is aborted. A captured graph has one as long as it lives."""
        return self.pins.add()

    def withdraw(self, reason: str) -> None:
        """Tell the group that this rank leaves: in its next pass peers raise RankWithdrawn at once, in symmetric memory RankLost."""
        with contextlib.suppress(RendezvousLost):  # nobody can be told, and the caller has a reason of its own
            self._group.withdraw(reason)
        if self.arena is not None:
            self.arena.leave()

    def close(self) -> None:
        """Let go of the group, the records with their weights and, if this tuner opened it, the store. The epoch stays served."""
        if self._closed:
            return
        self._closed = True
        self._records.clear()
        self._group.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._closed:
            self.withdraw(f"{type(error).__name__}: {first_line(error)}")
        self.close()

    def _explain(self) -> None:
        """Once: why a store that holds results has none for this environment."""
        if not self._explained:
            self._explained = True
            if (reason := why_nothing_fits(self.store, self.environment)) is not None:
                log.warning("store %s %s", self.store.url, reason)

    def _store_goes_on(self) -> None:
        """A store that is slow, and not dead, makes no rank a lost one."""
        with contextlib.suppress(RendezvousLost):  # the pass says so; what a committed one publishes does not depend on it
            self._group.progress()

    def _adopt_outcome(self, outcome: PassOutcome) -> None:
        self.arena, self.epoch = outcome.arena, outcome.epoch

    def _require_usable(self) -> None:
        if self._closed:
            raise TunerStateError("this tuner is closed; make another")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise TunerStateError("a pass can't run under CUDA graph capture; tune before capturing")


def _rank_group(group: dist.ProcessGroup | RankGroup | None, progress_timeout: timedelta, cap: timedelta) -> RankGroup:
    if group is None:
        return RankGroup.alone()
    if isinstance(group, RankGroup):
        return group
    job = job_settings()
    return RankGroup.from_process_group(
        group,
        run=job.run,
        restart=job.restart,
        agent=job.agent,
        progress_timeout=progress_timeout,
        cap=cap,
    )
