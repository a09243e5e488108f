"""The rounds of one cell: every rank times on its own share, all exchange, all conclude the same. Strategies `reduce` and `shard`.

Knows no store and no key. Whatever happens on a rank, it reaches every exchange: how many there are follows from the plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from moe_dist.distributed import converge
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import PlannedCell
from moe_dist.distributed.symmetric import Arena, Refused, reserve
from moe_dist.tuning.adoption import symmetric_bytes
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import CellMeasurer
from moe_dist.tuning.pass_terms import BUDGET_ENDED, Decided, PassSettings, timed
from moe_dist.tuning.problem import Abstain, Failed, Measurement, Operation, Problem, Tactic
from moe_dist.tuning.search import Race, finalists

# Calls in one window of a collective tactic: fixed, since a rank that calls once more than its peers waits for ever.
COLLECTIVE_CALLS = 10


@runtime_checkable
class UsesArena(Protocol):
    """An operation with tactics whose workspace is symmetric."""

    def use_arena(self, arena: Arena | Refused | None) -> None:
        """What probes bind such tactics to, from now on; without an arena binding them raises, and says why."""


class Rounds:
    """The measuring of one pass. records: this rank's operations by problem. spent: the budget is over, agreed by all ranks."""

    def __init__(self, settings: PassSettings, group: RankGroup, records: Mapping[Problem, Operation], journal: Journal | None) -> None:
        self._settings, self._group, self._records, self._journal = settings, group, records, journal
        self._started = time.monotonic()
        self._lent: Arena | Refused | None = None
        self.spent = False
        self._device_time = "cuda_graph" in settings.modes  # by events or in graphs, either way without the host

    def reduce(self, index: int, planned: PlannedCell) -> Decided:
        """Every rank times every candidate; drops, budget and winner follow from the reduced times."""
        measurer = self._measurer(planned)
        local = [tactic for tactic in planned.tactics if not tactic.collective]
        if measurer is not None:
            measurer.prepare(local)
        return self._race(f"measure-{index}", planned, local, measurer)

    def shard(self, index: int, planned: PlannedCell) -> Decided:
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
            measured = {standing.tactic: timed(standing) for standing in standings} | failed_here
        tactics = planned.tactics
        combined = self._group.reduce(
            f"shard-{index}", self._word(tactics, measured), lambda values: converge.combine_shares(values, tactics, yardstick)
        )
        shares = converge.SharesWord.from_bytes(combined, tactics)
        self._spend(shares.elapsed_s)
        final = finalists(shares.ratios, yardstick) if local else []
        if measurer is not None and not self.spent:
            measurer.prepare(final)
        decided = self._race(f"final-{index}", planned, final, measurer)
        beaten = tuple((tactic, f"{ratio:.2f}x {yardstick}, no finalist") for tactic, ratio in shares.ratios.items() if tactic not in final)
        return dataclasses.replace(
            decided,
            rejected=(*decided.rejected, *shares.failed.items(), *beaten),
            tried=decided.tried | {*shares.ratios, *shares.failed, *([yardstick] if shares.ratios else [])},
        )

    def alone(self, planned: PlannedCell) -> tuple[Race, dict[Tactic, Measurement]] | None:
        """All rounds of a cell on this rank alone: the race, and the candidates that failed in it; None: as `_measurer` says."""
        measurer = self._measurer(planned)
        if measurer is None or self._over_budget(time.monotonic() - self._started):
            return None
        measurer.prepare(planned.tactics)
        return self._race_alone(measurer, planned.tactics, planned.default)

    def lend_arena(self, to_tune: Sequence[PlannedCell]) -> None:
        """Symmetric memory for measuring, where the plan has tactics that may need it; where it can't be had they are out, with the reason."""
        collectives = [(planned.cell, tactic) for planned in to_tune for tactic in planned.tactics if tactic.collective]
        if collectives:
            self._lent = reserve(self._group, "lend", symmetric_bytes(collectives, self._records))
            self._use_arena(self._lent)

    def return_arena(self) -> None:
        """The pass is over, however it ended: no probe uses the lent memory any more."""
        self._use_arena(None)

    def _measurer(self, planned: PlannedCell) -> CellMeasurer | None:
        """None: this rank has no such problem, or the budget is spent; it then sends empty words."""
        operation = self._records.get(planned.cell.problem)
        if operation is None or self.spent:
            return None
        settings, group = self._settings, self._group
        return CellMeasurer(operation, planned.cell, settings.policy, settings.probe, journal=self._journal, progress=group.progress)

    def _race(self, step: str, planned: PlannedCell, tactics: Sequence[Tactic], measurer: CellMeasurer | None) -> Decided:
        """The rounds of one cell, each exchanged: their number is fixed, whatever is left to time."""
        race = Race(tactics, planned.default, device_time=self._device_time)
        for number in range(1 + self._settings.policy.rounds):
            in_time = not self.spent  # agreed: it follows from the words of the last exchange
            measured = measurer.round(race.alive, sweeps=1 if number == 0 else None) if measurer is not None and in_time else {}
            reduced = self._reduced(f"{step}-{number}", tactics, measured)
            if in_time:
                race.feed(reduced)
            else:
                race.stop(BUDGET_ENDED)
        self._time_collectives(step, planned, race, measurer)
        return Decided(
            planned.cell,
            planned.default,
            race.winner(),
            race.standing(planned.default),
            (*planned.rejected, *race.rejected.items()),
            frozenset(race.tried),
        )

    def _time_collectives(self, step: str, planned: PlannedCell, race: Race, measurer: CellMeasurer | None) -> None:
        """Tactics that talk to peers: all ranks are ready or none launches, and all launch the same number of times; never raced."""
        policy, names = self._settings.policy, self._group.names
        for at, tactic in enumerate(tactic for tactic in planned.tactics if tactic.collective):
            spent = self.spent
            if isinstance(self._lent, Arena):
                self._lent.restart()  # whatever the last one left there: all ranks have exchanged its result
            reason = measurer.bind(tactic) if measurer is not None and not spent else "this rank has no time or no such problem"
            ready = [word.decode() for word in self._group.exchange(f"{step}-ready-{at}", (reason or "").encode())]
            against = [f"rank {name}: {said}" for name, said in zip(names, ready, strict=True) if said]
            measured: Measurement = Failed(against[0]) if against else Abstain()
            if measurer is not None and not against:
                measured = measurer.run_counted(tactic, policy.rounds * policy.sweeps, COLLECTIVE_CALLS)
            reduced = self._reduced(f"{step}-collective-{at}", [tactic], {tactic: measured})
            race.enter(tactic, Failed(BUDGET_ENDED) if spent else reduced.get(tactic, Abstain()), tried=not spent)

    def _race_alone(self, measurer: CellMeasurer, tactics: Sequence[Tactic], default: Tactic) -> tuple[Race, dict[Tactic, Measurement]]:
        """All rounds on this rank alone: the race, and the candidates that failed in it."""
        race, failed = Race(tactics, default, device_time=self._device_time), dict[Tactic, Measurement]()
        for number in range(1 + self._settings.policy.rounds):
            measured = measurer.round(race.alive, sweeps=1 if number == 0 else None)
            failed.update((tactic, row) for tactic, row in measured.items() if isinstance(row, Failed))
            race.feed(measured)
        return race, failed

    def _reduced(self, step: str, tactics: Sequence[Tactic], measured: Mapping[Tactic, Measurement]) -> Mapping[Tactic, Measurement]:
        """The group's measurements of a round, reduced by the objective; what no rank timed is not among them."""
        objective, names = self._settings.objective, self._group.names
        combined = self._group.reduce(
            step, self._word(tactics, measured), lambda values: converge.combine_rounds(values, tactics, objective, names)
        )
        word = converge.RoundWord.from_bytes(combined, tactics)
        self._spend(word.elapsed_s)
        return word.measured

    def _word(self, tactics: Sequence[Tactic], measured: Mapping[Tactic, Measurement]) -> bytes:
        return converge.RoundWord(measured, time.monotonic() - self._started).to_bytes(tactics)

    def _spend(self, elapsed_s: float) -> None:
        """From the slowest rank's clock follows whether the budget is spent, for all alike."""
        self.spent = self.spent or self._over_budget(elapsed_s)

    def _over_budget(self, elapsed_s: float) -> bool:
        return self._settings.budget is not None and elapsed_s > self._settings.budget.total_seconds()

    def _use_arena(self, arena: Arena | Refused | None) -> None:
        for operation in self._records.values():
            if isinstance(operation, UsesArena):
                operation.use_arena(arena)
