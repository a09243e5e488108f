"""From every rank's measurements to one conclusion: pure functions over words, as `plan.py` is for agreeing.

Whoever holds the same words concludes the same. Times differ from rank to rank: the leader reads them all, by
`RankGroup.reduce`, and every rank concludes from the one word that they come to.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from moe_dist.errors import PassAborted
from moe_dist.tuning.problem import Abstain, Failed, Measurement, Tactic, Timed


@dataclasses.dataclass(frozen=True)
class RoundWord:
    """One rank's measurements of one round. elapsed_s: since its pass began; the slowest rank ends the budget for all."""

    measured: Mapping[Tactic, Measurement]
    elapsed_s: float = 0.0

    def to_bytes(self, tactics: Sequence[Tactic]) -> bytes:
        """Tactics are named by their place in the plan's list."""
        rows: list[list[Any]] = []
        for at, tactic in enumerate(tactics):
            match self.measured.get(tactic):
                case Timed(median_us, spread_us, samples):
                    rows.append([at, median_us, spread_us, samples])
                case Failed(reason):
                    rows.append([at, reason])
                case _:
                    pass  # an abstention is what is not said
        packed: bytes = msgpack.packb([self.elapsed_s, rows])
        return packed

    @classmethod
    def from_bytes(cls, value: bytes, tactics: Sequence[Tactic]) -> RoundWord:
        elapsed, rows = msgpack.unpackb(value)
        measured: dict[Tactic, Measurement] = {tactics[row[0]]: Failed(row[1]) if len(row) == 2 else Timed(*row[1:]) for row in rows}
        return cls(measured, elapsed)


def reduce_round(words: Sequence[RoundWord], tactics: Sequence[Tactic], objective: str, names: Sequence[int]) -> dict[Tactic, Measurement]:
    """One measurement a tactic for the whole group: a failure anywhere drops it, abstentions do not count.

    objective "max": the slowest rank sets the pace; "mean": the average rank.
    """
    combine = max if objective == "max" else statistics.fmean
    reduced: dict[Tactic, Measurement] = {}
    for tactic in tactics:
        said = [(name, word.measured.get(tactic, Abstain())) for name, word in zip(names, words, strict=True)]
        failures = [(name, measured.reason) for name, measured in said if isinstance(measured, Failed)]
        times = [measured for _, measured in said if isinstance(measured, Timed)]
        if failures:
            reduced[tactic] = Failed(f"rank {failures[0][0]}: {failures[0][1]}")
        elif times:
            spread, samples = max(time.spread_us for time in times), min(time.samples for time in times)
            reduced[tactic] = Timed(float(combine([time.median_us for time in times])), spread, samples)
        else:
            reduced[tactic] = Abstain()
    return reduced


def combine_rounds(values: Sequence[bytes], tactics: Sequence[Tactic], objective: str, names: Sequence[int]) -> bytes:
    """All ranks' words of one round as the group's word: `reduce_round` of them, and the slowest rank's clock."""
    words = [RoundWord.from_bytes(value, tactics) for value in values]
    return RoundWord(reduce_round(words, tactics, objective, names), max(word.elapsed_s for word in words)).to_bytes(tactics)


@dataclasses.dataclass(frozen=True)
class SharesWord:
    """What the ranks that split a cell's candidates found: ratios to the default, and reasons of those that failed somewhere."""

    ratios: Mapping[Tactic, float]
    failed: Mapping[Tactic, str]
    elapsed_s: float

    @classmethod
    def from_bytes(cls, value: bytes, tactics: Sequence[Tactic]) -> SharesWord:
        ratios, failed, elapsed = msgpack.unpackb(value)
        return cls({tactics[at]: ratio for at, ratio in ratios}, {tactics[at]: reason for at, reason in failed}, elapsed)


def combine_shares(values: Sequence[bytes], tactics: Sequence[Tactic], default: Tactic) -> bytes:
    """All ranks' words about their shares of the candidates, as one `SharesWord`."""
    words = [RoundWord.from_bytes(value, tactics) for value in values]
    failed = {tactic: row.reason for word in words for tactic, row in word.measured.items() if isinstance(row, Failed)}
    ratios = {tactic: ratio for tactic, ratio in reduce_ratios(words, tactics, default).items() if tactic not in failed}
    places = {tactic: at for at, tactic in enumerate(tactics)}
    packed: bytes = msgpack.packb(
        [
            [[places[tactic], ratio] for tactic, ratio in ratios.items()],
            [[places[tactic], reason] for tactic, reason in failed.items()],
            max(word.elapsed_s for word in words),
        ]
    )
    return packed


def reduce_ratios(words: Sequence[RoundWord], tactics: Sequence[Tactic], default: Tactic) -> dict[Tactic, float]:
    """Each tactic's time over the default's on the rank that timed it: comparable between ranks that timed different ones."""
    ratios: dict[Tactic, float] = {}
    for word in words:
        base = word.measured.get(default)
        for tactic in tactics:
            measured = word.measured.get(tactic)
            if isinstance(base, Timed) and isinstance(measured, Timed) and tactic != default:
                ratios[tactic] = measured.median_us / base.median_us
    return ratios


def require_one_digest(digests: Sequence[str], names: Sequence[int], what: str) -> None:
    """PassAborted: ranks concluded differently from the same words; names those that differ from the most."""
    if len(set(digests)) > 1:
        usual = max(sorted(set(digests)), key=list(digests).count)
        odd = [name for name, held in zip(names, digests, strict=True) if held != usual]
        raise PassAborted(
            f"{what} differ: rank {', '.join(map(str, odd))} holds another than the rest; the pass is aborted, nothing changed", odd
        )
