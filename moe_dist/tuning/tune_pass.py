"""One pass of a group: agree, measure, decide, reserve, commit. Composes plan, measure, search, converge and stores, which don't know each other.

A pass has no state that outlives it: the tuner gives it what this rank has and takes the outcome. A group of one runs the
very same steps. Every exchange below is reached by every rank, whatever happened on it: failures travel as words.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgpack

from moe_dist.distributed import converge, epoch, plan
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused, reserve
from moe_dist.errors import NothingRunnable, PassAborted, RankLost, RankWithdrawn, RendezvousLost, SettingsDiffer, first_line
from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, decode_entry, decode_epoch, encode_entry, encode_epoch
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning.identity import Environment, Key
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import CellMeasurer, journal_key
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import (
    Abstain,
    Bucket,
    BucketLadder,
    Cell,
    Entry,
    Epoch,
    Failed,
    Measurement,
    Operation,
    ProbeSpec,
    Problem,
    Tactic,
    Timed,
    Winner,
    canonical,
    digest,
    pack,
)
from moe_dist.tuning.search import Race, Standing, finalists

log = logging.getLogger("moe_dist.tuning")
T = TypeVar("T")

# Calls in one window of a collective tactic: fixed, since a rank that calls once more than its peers waits for ever.
COLLECTIVE_CALLS = 10


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
            "probe": self.probe, "ladder": self.ladder.bounds, "buckets": tuple(bucket.high for bucket in self.buckets),
            "modes": self.modes, "deployment": self.deployment, "budget_s": self.budget.total_seconds() if self.budget is not None else None,
            "measure": self.measure,
        }  # fmt: skip
        return {name: canonical(value) for name, value in plain.items()}


@runtime_checkable
class UsesArena(Protocol):
    """An operation with tactics whose workspace is symmetric."""

    def use_arena(self, arena: Arena | Refused | None) -> None:
        """What probes bind such tactics to, from now on; without an arena binding them raises, and says why."""


@dataclasses.dataclass(frozen=True)
class ProgressEvent:
    """How far a pass is. phase: "agree", "measure", "decide", "commit" or "done"; cells: those to time, and how many are done."""

    phase: str
    done: int = 0
    cells: int = 0
    cell: Cell | None = None


@dataclasses.dataclass(frozen=True)
class Decided:
    """What the measuring of one cell came to. winner None: nothing could be timed to the end; the default serves, unmeasured."""

    cell: Cell
    default: Tactic
    winner: Standing | None
    default_standing: Standing | None
    rejected: tuple[tuple[Tactic, str], ...]


@dataclasses.dataclass(frozen=True)
class PassOutcome:
    """epoch: the table to serve from; arena: the symmetric memory that its tactics need. keys: the key digest of each cell of the plan.

    measured: candidates timed; hits: cells served from entries.
    """

    epoch: Epoch
    cells: tuple[Cell, ...]
    keys: Mapping[Cell, str]
    measured: int
    hits: int
    rejected: tuple[tuple[Cell, Tactic, str], ...]
    entries: Mapping[Cell, bytes]
    stored: tuple[int, str]
    arena: Arena | None = None


class TunePass:
    """Runs once. records: this rank's operations by problem. memory: entries that this process already holds, by store key.

    serving: the epoch in force; arena: the symmetric memory that it was given.
    """

    def __init__(
        self,
        settings: PassSettings,
        group: RankGroup,
        environment: Environment,
        records: Mapping[Problem, Operation],
        store: Store,
        *,
        serving: Epoch,
        arena: Arena | None,
        memory: dict[str, bytes],
        journal: Journal | None,
        workspace_limit: int | None,
        on_progress: Callable[[ProgressEvent], None],
        adopt: Callable[[PassOutcome], None],
    ) -> None:
        self._settings, self._group, self._environment, self._records = settings, group, environment, records
        self._store, self._serving, self._memory, self._journal = store, serving, memory, journal
        self._workspace_limit, self._on_progress, self._adopt = workspace_limit, on_progress, adopt
        self._arena = arena
        self._environments = [environment]
        self._started = time.monotonic()
        self._spent = False
        self._lent: Arena | Refused | None = None

    def run(self) -> PassOutcome:
        """The outcome that the whole group committed, adopted. Any error before that leaves the previous epoch in force on every rank;
        what comes after (publishing, the callback) can fail, but changes no rank's table."""
        group = self._group
        group.begin_pass()
        try:
            self._on_progress(ProgressEvent("agree"))
            agreed = self._agree()
            to_tune = [cell for cell in agreed.cells if cell.serve is None] if self._settings.measure else []
            self._lend_arena(to_tune)
            if self._settings.strategy == "reload":
                # Who talks to peers can't be tuned apart: such cells are reduced, whatever the strategy.
                together = [cell for cell in to_tune if any(tactic.collective for tactic in cell.tactics)]
                apart, entries = self._tune_apart([cell for cell in to_tune if cell not in together], agreed.number)
                decided = apart + self._tune_together(together, self._reduce)
            else:
                entries = {}
                decided = self._tune_together(to_tune, self._reduce if self._settings.strategy == "reduce" else self._shard)
            outcome = self._conclude(agreed, decided, entries)
            if self._may_need_arena(agreed):
                outcome = dataclasses.replace(outcome, arena=reserve_for(group, outcome.epoch, self._records, self._arena))
            self._on_progress(ProgressEvent("commit", len(to_tune), len(to_tune)))
            group.commit(outcome.epoch.digest)
        except (SettingsDiffer, NothingRunnable, PassAborted) as error:
            group.conclude(error)
            raise
        except (RankLost, RankWithdrawn, RendezvousLost):
            raise
        except BaseException as error:
            group.withdraw(f"{type(error).__name__}: {first_line(error)}")
            raise
        finally:
            self._use_arena(None)
        # Peers serve it from now on, so this rank does too, before anything else can fail.
        self._adopt(outcome)
        if group.is_leader and self._settings.measure:
            self._publish(outcome)
        self._memory.update((self._key(cell).path, entry) for cell, entry in outcome.entries.items())
        self._on_progress(ProgressEvent("done", len(to_tune), len(to_tune)))
        return outcome

    # -- agree ----------------------------------------------------------------------------------------------------------

    def _key(self, cell: Cell, environment: Environment | None = None) -> Key:
        settings = self._settings
        return Key(
            environment=environment or self._environment,
            cell=cell,
            policy=settings.policy.kind,
            objective=settings.objective,
            probe=settings.probe,
        )

    def _agree(self) -> plan.Plan:
        names, group = self._group.names, self._group
        offers = _decoded(group.exchange("agree-1", self._offer().to_bytes()), plan.Offer.from_bytes)
        proposal = plan.agree_offers(offers, names, mixed_environments=self._settings.mixed_environments)
        self._environments = list(dict.fromkeys(Environment.from_plain(offer.environment) for offer in offers))
        answers = _decoded(group.exchange("agree-2", self._answer(proposal).to_bytes()), plan.Answer.from_bytes)
        return plan.agree_plan(proposal, answers, names)

    def _offer(self) -> plan.Offer:
        cells = [
            Cell(problem, mode, bucket) for problem in self._records for mode in self._settings.modes for bucket in self._settings.buckets
        ]
        hits = self._hits(cells)
        offered = {}
        for cell in cells:
            operation = self._records[cell.problem]
            candidates = tuple(dict.fromkeys(operation.candidates(cell.bucket, cell.mode)))
            served = self._serving.number if cell in self._serving.winners else 0
            offered[cell] = plan.CellOffer(operation.default(cell.bucket, cell.mode), candidates, hits.get(cell), served)
        return plan.Offer(
            settings=self._settings.agreed(),
            environment=self._environment.to_plain(),
            cells=offered,
            workspace_limit=self._workspace_limit,
            epoch=self._serving.number,
            epoch_digest=self._serving.digest,
            stored=self._stored_epoch() if self._group.is_leader else (0, ""),
        )

    def _stored_epoch(self) -> tuple[int, str]:
        """Number and digest of the deployment's newest epoch in the store."""
        deployment = self._settings.deployment
        newest = epoch.newest(self._store, deployment, lambda value: read_committed(value, deployment))
        return (newest.epoch.number, newest.epoch.digest) if newest else (epoch.newest_number(self._store, deployment), "")

    def _hits(self, cells: Iterable[Cell]) -> dict[Cell, bytes]:
        """Entries of this rank's cells: memory first, then one read of the store. A damaged one is a miss, logged with its reason."""
        paths = {cell: self._key(cell).path for cell in cells}
        stored = self._store.get_many([path for path in paths.values() if path not in self._memory])
        hits = {}
        for cell, path in paths.items():
            value = self._memory.get(path) or stored.get(path)
            if value is None:
                continue
            try:
                decode_entry(value, self._key(cell).digest)
            except Malformed as error:
                log.warning("%s: the stored entry is a miss: %s", cell, error)
                continue
            hits[cell] = value
        return hits

    def _answer(self, proposal: plan.Proposal) -> plan.Answer:
        answers: list[plan.CellAnswer | None] = []
        for proposed in proposal.cells:
            operation = self._records.get(proposed.cell.problem)
            if operation is None:
                answers.append(None)
                continue
            self._group.progress()
            allowed = {self._key(proposed.cell, environment).digest for environment in self._environments}
            hits = tuple(self._why_not_hit(operation, proposed, hit, allowed, proposal.workspace_limit) for hit in proposed.hits)
            candidates = tuple(self._why_not(operation, proposed, tactic, proposal.workspace_limit) for tactic in proposed.candidates)
            answers.append(plan.CellAnswer(hits, candidates))
        return plan.Answer(tuple(answers))

    def _why_not_hit(
        self, operation: Operation, proposed: plan.ProposedCell, hit: bytes, allowed: set[str], limit: int | None
    ) -> str | None:
        try:
            entry = decode_entry(hit)
        except Malformed as error:
            return str(error)
        if entry.key_digest not in allowed:
            return f"it was tuned under another key ({entry.key_digest[:8]})"
        reason = self._why_not(operation, proposed, entry.tactic, limit)
        if reason is not None:
            log.warning("%s: the stored winner %s is a miss: %s", proposed.cell, entry.tactic, reason)
        return reason

    def _why_not(self, operation: Operation, proposed: plan.ProposedCell, tactic: Tactic, limit: int | None) -> str | None:
        cell = proposed.cell
        if (reason := operation.why_not(tactic, cell.bucket)) is not None:
            return reason
        needed = operation.workspace(tactic, cell.bucket.high).nbytes
        if limit is not None and needed > limit:
            return f"needs {needed} bytes of workspace; the limit is {limit}"
        if self._journal is not None and tactic != proposed.default:
            return self._journal.quarantined(journal_key(cell, tactic))
        return None

    # -- measure --------------------------------------------------------------------------------------------------------

    def _measurer(self, planned: plan.PlannedCell) -> CellMeasurer | None:
        """None: this rank has no such problem, or the budget is spent; it then sends empty words."""
        operation = self._records.get(planned.cell.problem)
        if operation is None or self._spent:
            return None
        settings, group = self._settings, self._group
        return CellMeasurer(operation, planned.cell, settings.policy, settings.probe, journal=self._journal, progress=group.progress)

    def _tune_together(self, to_tune: Sequence[plan.PlannedCell], measure: Callable[[int, plan.PlannedCell], Decided]) -> list[Decided]:
        decided = []
        for index, planned in enumerate(to_tune):
            self._on_progress(ProgressEvent("measure", index, len(to_tune), planned.cell))
            decided.append(measure(index, planned))
        return decided

    def _reduce(self, index: int, planned: plan.PlannedCell) -> Decided:
        """Every rank times every candidate; drops, budget and winner follow from the reduced times."""
        measurer = self._measurer(planned)
        local = [tactic for tactic in planned.tactics if not tactic.collective]
        if measurer is not None:
            measurer.prepare(local)
        return self._race(f"measure-{index}", planned, local, measurer)

    def _shard(self, index: int, planned: plan.PlannedCell) -> Decided:
        """Ranks split the candidates, each also timing the yardstick; the best by ratio to it are then timed by all."""
        measurer = self._measurer(planned)
        local = [tactic for tactic in planned.tactics if not tactic.collective]
        # The default, unless it can't run somewhere or is collective: then the next in the plan's order.
        yardstick = local[0] if local else planned.default
        measured: Mapping[Tactic, Measurement] = {}
        if measurer is not None:
            place, ranks = planned.ranks.index(self._group.rank), len(planned.ranks)
            mine = [*local[:1], *local[1:][place::ranks]]
            measurer.prepare(mine)
            race, failed_here = self._race_alone(measurer, mine, yardstick)
            standings = [standing for tactic in mine if (standing := race.standing(tactic)) is not None]
            measured = {standing.tactic: _timed(standing) for standing in standings} | failed_here
        words = self._exchange(f"shard-{index}", planned.tactics, measured)
        failed = {tactic: row.reason for word in words for tactic, row in word.measured.items() if isinstance(row, Failed)}
        ratios = {
            tactic: ratio for tactic, ratio in converge.reduce_ratios(words, planned.tactics, yardstick).items() if tactic not in failed
        }
        final = finalists(ratios, yardstick) if local else []
        if measurer is not None and not self._spent:
            measurer.prepare(final)
        decided = self._race(f"final-{index}", planned, final, measurer)
        beaten = tuple((tactic, f"{ratio:.2f}x {yardstick}, no finalist") for tactic, ratio in ratios.items() if tactic not in final)
        return dataclasses.replace(decided, rejected=(*decided.rejected, *failed.items(), *beaten))

    def _race(self, step: str, planned: plan.PlannedCell, tactics: Sequence[Tactic], measurer: CellMeasurer | None) -> Decided:
        """The rounds of one cell, each exchanged: their number is fixed, whatever is left to time."""
        race = Race(tactics, planned.default)
        for number in range(1 + self._settings.policy.rounds):
            timed = not self._spent  # agreed: it follows from the words of the last exchange
            measured = measurer.round(race.alive, sweeps=1 if number == 0 else None) if measurer is not None and timed else {}
            words = self._exchange(f"{step}-{number}", tactics, measured)
            if timed:
                race.feed(converge.reduce_round(words, race.alive, self._settings.objective, self._group.names))
            else:
                race.stop("the time budget ended before it was timed to the end")
        self._time_collectives(step, planned, race, measurer)
        return Decided(
            planned.cell, planned.default, race.winner(), race.standing(planned.default), (*planned.rejected, *race.rejected.items())
        )

    def _time_collectives(self, step: str, planned: plan.PlannedCell, race: Race, measurer: CellMeasurer | None) -> None:
        """Tactics that talk to peers: all ranks are ready or none launches, and all launch the same number of times; never raced."""
        policy, names = self._settings.policy, self._group.names
        for at, tactic in enumerate(tactic for tactic in planned.tactics if tactic.collective):
            spent = self._spent
            if isinstance(self._lent, Arena):
                self._lent.restart()  # whatever the last one left there: all ranks have exchanged its result
            reason = measurer.bind(tactic) if measurer is not None and not spent else "this rank has no time or no such problem"
            ready = [word.decode() for word in self._group.exchange(f"{step}-ready-{at}", (reason or "").encode())]
            against = [f"rank {name}: {said}" for name, said in zip(names, ready, strict=True) if said]
            measured: Measurement = Failed(against[0]) if against else Abstain()
            if measurer is not None and not against:
                measured = measurer.run_counted(tactic, policy.rounds * policy.sweeps, COLLECTIVE_CALLS)
            words = self._exchange(f"{step}-collective-{at}", [tactic], {tactic: measured})
            race.enter(tactic, converge.reduce_round(words, [tactic], self._settings.objective, names)[tactic])

    # -- symmetric memory -----------------------------------------------------------------------------------------------

    def _lend_arena(self, to_tune: Sequence[plan.PlannedCell]) -> None:
        """Symmetric memory for measuring, where the plan has tactics that may need it; where it can't be had they are out, with the reason."""
        collectives = [(planned.cell, tactic) for planned in to_tune for tactic in planned.tactics if tactic.collective]
        if collectives:
            self._lent = reserve(self._group, "lend", _symmetric_bytes(collectives, self._records))
            self._use_arena(self._lent)

    def _use_arena(self, arena: Arena | Refused | None) -> None:
        for operation in self._records.values():
            if isinstance(operation, UsesArena):
                operation.use_arena(arena)

    def _may_need_arena(self, agreed: plan.Plan) -> bool:
        """Whether the epoch to come may hold a collective tactic: from the plan alone, so that all ranks take the step or none."""
        planned = [tactic for cell in agreed.cells for tactic in (cell.default, *cell.tactics)]
        served = [decode_entry(cell.serve).tactic for cell in agreed.cells if cell.serve is not None]
        kept = [winner.tactic for winner in self._serving.winners.values()] if agreed.base is not None else []
        return any(tactic.collective for tactic in (*planned, *served, *kept))

    def _race_alone(self, measurer: CellMeasurer, tactics: Sequence[Tactic], default: Tactic) -> tuple[Race, dict[Tactic, Measurement]]:
        """All rounds on this rank alone: the race, and the candidates that failed in it."""
        race, failed = Race(tactics, default), dict[Tactic, Measurement]()
        for number in range(1 + self._settings.policy.rounds):
            measured = measurer.round(race.alive, sweeps=1 if number == 0 else None)
            failed.update((tactic, row) for tactic, row in measured.items() if isinstance(row, Failed))
            race.feed(measured)
        return race, failed

    def _exchange(self, step: str, tactics: Sequence[Tactic], measured: Mapping[Tactic, Measurement]) -> list[converge.RoundWord]:
        """Every rank's word of a round; from the slowest rank's clock follows whether the budget is spent, for all alike."""
        word = converge.RoundWord(measured, time.monotonic() - self._started)
        words = [converge.RoundWord.from_bytes(value, tactics) for value in self._group.exchange(step, word.to_bytes(tactics))]
        self._spent = self._spent or self._over_budget(max(word.elapsed_s for word in words))
        return words

    def _over_budget(self, elapsed_s: float) -> bool:
        return self._settings.budget is not None and elapsed_s > self._settings.budget.total_seconds()

    def _tune_apart(self, to_tune: Sequence[plan.PlannedCell], number: int) -> tuple[list[Decided], dict[Cell, bytes]]:
        """Strategy `reload`: measure alone, say what won, pass the barrier; then all adopt the one table that the leader lists.

        No winner becomes a stored entry before the group has committed it: another rank may have rejected it.
        """
        group = self._group
        mine: dict[int, bytes] = {}
        failed: dict[int, list[list[Any]]] = {}
        for index, planned in enumerate(to_tune):
            self._on_progress(ProgressEvent("measure", index, len(to_tune), planned.cell))
            measurer = self._measurer(planned)
            if measurer is None or self._over_budget(time.monotonic() - self._started):
                continue
            measurer.prepare(planned.tactics)
            race, failed_here = self._race_alone(measurer, planned.tactics, planned.default)
            failed[index] = [[planned.tactics.index(tactic), row.reason] for tactic, row in failed_here.items() if isinstance(row, Failed)]
            decided = Decided(planned.cell, planned.default, race.winner(), race.standing(planned.default), ())
            if (entry := self._entry(decided, self._environment)) is not None:
                mine[index] = entry
        published = [
            msgpack.unpackb(word, strict_map_key=False) for word in group.exchange("reload-published", msgpack.packb([mine, failed]))
        ]
        table = msgpack.packb(self._list_table(to_tune, published)) if group.is_leader else b""
        path = f"proposals/{digest(self._settings.deployment)}/{number:08d}"
        announced = table and self._store.put(path, table)
        proposed = msgpack.unpackb(group.exchange("reload-epoch", msgpack.packb([bool(announced), digest(table)]))[0])
        seen = self._store.get(path) if proposed[0] else None
        shared = [bool(word) for word in group.exchange("reload-read", b"\1" if seen is not None and digest(seen) == proposed[1] else b"")]
        strangers = [name for name, reads in zip(group.names, shared, strict=True) if not reads]
        if strangers and group.is_leader:
            log.warning(
                "store %s is not shared with rank %s: the table is sent over the group", self._store.url, ", ".join(map(str, strangers))
            )
        sent = group.exchange("reload-table", table if strangers else b"")[0]
        adopted = sent or (seen if seen is not None else table)
        if group.is_leader:
            self._store.delete(path)
        entries = {to_tune[index].cell: entry for index, entry in msgpack.unpackb(adopted, strict_map_key=False).items()}
        decided_cells = [self._decided_from(planned, entries.get(planned.cell), index, published) for index, planned in enumerate(to_tune)]
        return decided_cells, entries

    def _list_table(self, to_tune: Sequence[plan.PlannedCell], published: Sequence[Any]) -> dict[int, bytes]:
        """The leader's choice for each cell: what the store holds now, else the first rank's own; never a tactic that failed somewhere."""
        table: dict[int, bytes] = {}
        stored = self._store.get_many([self._key(planned.cell).path for planned in to_tune])
        for index, planned in enumerate(to_tune):
            bad = {planned.tactics[at] for _, failed in published for at, _ in failed.get(index, [])}
            offered = [stored.get(self._key(planned.cell).path), *(mine.get(index) for mine, _ in published)]
            for entry in offered:
                if entry is not None and self._fits(entry, planned, bad):
                    table[index] = entry
                    break
        return table

    def _fits(self, value: bytes, planned: plan.PlannedCell, bad: set[Tactic]) -> bool:
        try:
            entry = decode_entry(value)
        except Malformed:
            return False
        return (
            entry.key_digest in {self._key(planned.cell, e).digest for e in self._environments}
            and entry.tactic in planned.tactics
            and entry.tactic not in bad
        )

    def _decided_from(self, planned: plan.PlannedCell, value: bytes | None, index: int, published: Sequence[Any]) -> Decided:
        rejected = [(planned.tactics[at], reason) for _, failed in published for at, reason in failed.get(index, [])]
        if value is None:
            return Decided(planned.cell, planned.default, None, None, (*planned.rejected, *rejected))
        entry = decode_entry(value)
        default = (
            Standing(entry.default, entry.default_time.median_us, entry.default_time.spread_us, entry.default_time.samples)
            if entry.default_time
            else None
        )
        winner = Standing(entry.tactic, entry.time.median_us, entry.time.spread_us, entry.time.samples)
        return Decided(planned.cell, planned.default, winner, default, (*planned.rejected, *rejected))

    # -- decide and publish -----------------------------------------------------------------------------------------------

    def _conclude(self, agreed: plan.Plan, decided: Sequence[Decided], entries: dict[Cell, bytes]) -> PassOutcome:
        """The new table: the previous one where all served the same, plus what was served and tuned; its digest must be one."""
        if agreed.base is None:
            log.warning("the ranks served different epochs: only the cells of this pass are kept")
        winners = dict(self._serving.winners) if agreed.base is not None else {}
        kept: dict[Cell, bytes] = dict(entries)
        hits = [cell for cell in agreed.cells if cell.serve is not None]
        for planned in hits:
            assert planned.serve is not None
            entry = decode_entry(planned.serve)
            winners[planned.cell] = _winner(entry, "hit")
            kept[planned.cell] = planned.serve
        for outcome in decided:
            if outcome.winner is None:
                winners.pop(outcome.cell, None)
                continue
            default_us = outcome.default_standing.median_us if outcome.default_standing else None
            winners[outcome.cell] = Winner(outcome.winner.tactic, outcome.winner.median_us, outcome.default, default_us, "tuned")
            if outcome.cell not in kept and (made := self._entry(outcome, self._environment)) is not None:
                kept[outcome.cell] = made
        table = Epoch(agreed.number, self._settings.deployment, winners)
        if table.digest == agreed.stored[1]:
            table = dataclasses.replace(table, number=agreed.stored[0])  # nothing new: no joiner needs another epoch
        digests = [word.decode() for word in self._group.exchange("decide", table.digest.encode())]
        converge.require_one_digest(digests, self._group.names, "winner tables")
        return PassOutcome(
            epoch=table,
            cells=tuple(planned.cell for planned in agreed.cells),
            keys={planned.cell: self._key(planned.cell).digest for planned in agreed.cells},
            measured=sum(len(planned.tactics) for planned in agreed.cells if planned.serve is None and self._settings.measure),
            hits=len(hits),
            rejected=tuple((outcome.cell, tactic, reason) for outcome in decided for tactic, reason in outcome.rejected),
            entries=kept,
            stored=agreed.stored,
        )

    def _entry(self, decided: Decided, environment: Environment) -> bytes | None:
        if decided.winner is None:
            return None
        return encode_entry(
            Entry(
                key=pack(self._key(decided.cell, environment).canonical()),
                tactic=decided.winner.tactic,
                time=_timed(decided.winner),
                default=decided.default,
                default_time=_timed(decided.default_standing) if decided.default_standing else None,
                provenance={"host": platform.node(), "pid": str(os.getpid()), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
            )
        )

    def _publish(self, outcome: PassOutcome) -> None:
        """The leader's part after the commit, best effort: entries (one per environment), then the epoch that joiners adopt."""
        held = self._store.get_many([self._key(cell).path for cell in outcome.entries])
        for cell, entry in outcome.entries.items():
            winner = outcome.epoch.winners.get(cell)
            if winner is None or (winner.source != "tuned" and self._key(cell).path in held):
                continue  # a hit that only another rank's store held is published here too
            for environment in self._environments:
                rekeyed = dataclasses.replace(decode_entry(entry), key=pack(self._key(cell, environment).canonical()))
                self._store.put(self._key(cell, environment).path, encode_entry(rekeyed))
        if (outcome.epoch.number, outcome.epoch.digest) == outcome.stored:
            return
        paths = [self._key(cell).path for cell in outcome.epoch.winners]
        fresh = {self._key(cell).path: entry for cell, entry in outcome.entries.items()}
        embedded = {path: value for path in paths if (value := fresh.get(path) or self._memory.get(path)) is not None}
        published = epoch.publish(self._store, self._settings.deployment, outcome.epoch.number, encode_epoch(outcome.epoch, embedded))
        if not published and not isinstance(self._store, MemoryStore):  # from a process's own memory nobody joins anyway
            log.warning("epoch %d could not be published to %s: nobody can join until it is", outcome.epoch.number, self._store.url)


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


def reserve_for(group: RankGroup, table: Epoch, records: Mapping[Problem, Operation], held: Arena | None) -> Arena | None:
    """The symmetric memory of `table`, at the maximum over its tactics. PassAborted, on every rank alike: a rank can't have it."""
    tactics = [(cell, tactic) for cell, winner in table.winners.items() for tactic in (winner.tactic, winner.default)]
    got = reserve(group, "reserve", _symmetric_bytes(tactics, records), held)
    if isinstance(got, Refused):
        raise PassAborted(f"{got.reason}; the pass is aborted, nothing changed", got.ranks)
    return got


def _symmetric_bytes(tactics: Iterable[tuple[Cell, Tactic]], records: Mapping[Problem, Operation]) -> int:
    """The most that one of `tactics` needs of a rank's symmetric memory, as far as this rank has their problems."""
    asked = [records[cell.problem].workspace(tactic, cell.bucket.high) for cell, tactic in tactics if cell.problem in records]
    return max((workspace.nbytes for workspace in asked if workspace.symmetric), default=0)


def _decoded(words: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Equal words are decoded once: thousands of ranks say the same."""
    known = {word: decode(word) for word in dict.fromkeys(words)}
    return [known[word] for word in words]


def _timed(standing: Standing) -> Timed:
    return Timed(standing.median_us, standing.spread_us, standing.rounds)


def _winner(entry: Entry, source: str) -> Winner:
    return Winner(entry.tactic, entry.time.median_us, entry.default, entry.default_time.median_us if entry.default_time else None, source)
