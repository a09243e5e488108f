"""Which candidates stay in the race and which one wins: pure functions of reduced times. Knows no clock, rank or store.

Every rank feeds the same times in the same order, so every rank drops and picks the same.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from moe_dist.tuning.problem import Abstain, Failed, Measurement, Tactic, Timed

# Slower than the best by this factor after round 0, 1, 2 ...: dropped. The first look is one short window that an
# interrupted thread can double, so it is wide.
DROP_RATIOS = (3.0, 1.25, 1.10, 1.05)
# The same where only the device is timed: nothing interrupts it. In nine windows of a graph an H200 stayed within 0.2% of its median (half
# the range; 2.5% in nine of ten cells, 7% where its clock falls under load): twice the worst of it is no reason to be dropped at first sight.
DEVICE_DROP_RATIOS = (1.15, 1.08, 1.05, 1.03)
# Times closer than this are equal: run-to-run noise of a quiet machine.
TIE_RATIO = 1.02


@dataclasses.dataclass(frozen=True)
class Standing:
    """A candidate's time so far: the median over its rounds, and their spread (half the range), in microseconds."""

    tactic: Tactic
    median_us: float
    spread_us: float
    rounds: int


class Race:
    """The race of one cell. `candidates` has the default first; the default is timed in every round and never dropped.

    device_time: the times are the device's alone, so that a slow candidate shows at once.
    """

    def __init__(self, candidates: Sequence[Tactic], default: Tactic, *, device_time: bool = False) -> None:
        self.default = default
        self._ratios = DEVICE_DROP_RATIOS if device_time else DROP_RATIOS
        self.alive: list[Tactic] = list(candidates)
        self.rejected: dict[Tactic, str] = {}
        self.tried: set[Tactic] = set()  # those that were timed, or failed in it
        self._times: dict[Tactic, list[float]] = {tactic: [] for tactic in candidates}
        self._rounds = 0
        self._complete = True

    def feed(self, reduced: Mapping[Tactic, Measurement]) -> None:
        """One round of reduced measurements. A candidate that failed, or was not timed, is out."""
        for tactic in list(self.alive):
            measured = reduced.get(tactic, Abstain())
            if not isinstance(measured, Abstain):
                self.tried.add(tactic)
            if isinstance(measured, Timed):
                self._times[tactic].append(measured.median_us)
            else:
                self._reject(tactic, measured.reason if isinstance(measured, Failed) else "timed on no rank")
        limit = self._ratios[min(self._rounds, len(self._ratios) - 1)]
        self._rounds += 1
        if not self.alive:
            return
        best = min(statistics.median(self._times[tactic]) for tactic in self.alive)
        for tactic in list(self.alive):
            ratio = statistics.median(self._times[tactic]) / best
            if ratio > limit and tactic != self.default:
                self._reject(tactic, f"{ratio:.2f}x the best after round {self._rounds - 1}")

    def enter(self, tactic: Tactic, measured: Measurement, *, tried: bool = True) -> None:
        """A tactic that was timed outside the rounds, because its runs are counted alike on all ranks. tried False: there was no time for it."""
        self.alive.append(tactic)
        if tried:
            self.tried.add(tactic)
        self._times[tactic] = [measured.median_us] if isinstance(measured, Timed) else []
        if not isinstance(measured, Timed):
            self._reject(tactic, measured.reason if isinstance(measured, Failed) else "timed on no rank")

    def stop(self, reason: str) -> None:
        """The budget ended before this race did: an incomplete candidate cannot win."""
        self._complete = False
        for tactic in list(self.alive):
            self._reject(tactic, reason)

    def standing(self, tactic: Tactic) -> Standing | None:
        times = self._times.get(tactic)
        if not times:
            return None
        return Standing(tactic, statistics.median(times), (max(times) - min(times)) / 2, len(times))

    def winner(self) -> Standing | None:
        """The fastest survivor; within the noise the default, else the first by name. None: nothing can win."""
        standings = [standing for tactic in self.alive if (standing := self.standing(tactic)) is not None]
        if not self._complete or not standings:
            return None
        best = min(standings, key=lambda standing: standing.median_us)
        ties = [
            s for s in standings if s.median_us - best.median_us <= max((TIE_RATIO - 1) * best.median_us, min(s.spread_us, best.spread_us))
        ]
        default = next((s for s in standings if s.tactic == self.default), None)
        if default is not None and default not in ties:  # what ties with a noisy best may be slower than a steady default
            ties = [s for s in ties if s.median_us < default.median_us]
        return min(ties, key=lambda standing: (standing.tactic != self.default, str(standing.tactic)))

    def _reject(self, tactic: Tactic, reason: str) -> None:
        self.alive.remove(tactic)
        self.rejected[tactic] = reason


def finalists(ratios: Mapping[Tactic, float], default: Tactic, count: int = 3) -> list[Tactic]:
    """The default and the `count` best by their ratio to it (timed on different ranks), in the order of a race."""
    best = sorted((ratio, str(tactic), tactic) for tactic, ratio in ratios.items() if tactic != default)[:count]
    return [default, *sorted((tactic for _, _, tactic in best), key=str)]
