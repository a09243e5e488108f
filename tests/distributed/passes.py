"""What tests of whole passes over real processes share: operations of known cost, a tuner of them, and the one table that all hold.

Where a rank meets a fault the pool holds finalize + all-reduce, too (`with_reduction`): tactics in which a divergence would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from fakes import FakeOperation
from ranks import Rank

from moe_dist.allreduce import FinalizeAllReduce
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import PassReport, Tuner

# So far apart that a loaded machine, which wakes a sleeper late by ten milliseconds, can't reorder them.
COSTS: Mapping[str, float | str] = {"plain": 30_000.0, "quick": 1000.0, "slow": 90_000.0}


POLICY = MeasurementPolicy(rounds=2, sweeps=2, window=timedelta(milliseconds=2))


each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def make_tuner(rank: Rank, strategy: str, *, store: str = "", progress_timeout: float = 5.0, cap: float = 60.0, **settings: Any) -> Tuner:
    group = rank.group(progress_timeout=progress_timeout, cap=cap)
    settings = {"ladder": BucketLadder((1, 4)), "policy": POLICY, "deployment": "test", "device": "cpu"} | settings
    return Tuner(store=store or str(rank.folder / "store"), group=group, strategy=strategy, **settings)


def table(report: PassReport) -> dict[str, str]:
    return {
        f"{row.cell.problem.fields[0][1]} {row.cell.bucket}": str(row.winner.tactic["name"]) if row.winner else "untuned"
        for row in report.rows
        if row.cell.problem.operation == "fake"
    }


def tune(
    rank: Rank,
    strategy: str,
    operations: Callable[[Rank], list[Any]],
    settings: Callable[[Rank], dict[str, Any]] = lambda rank: {},
) -> Any:
    """(winners, measured, hits, digest, calls of each tactic on this rank)."""
    recorded = operations(rank)
    with make_tuner(rank, strategy, **settings(rank)) as tuner:
        for operation in recorded:
            tuner.record(operation)
        report = tuner.run_pass()
        return (
            table(report),
            report.measured,
            report.hits,
            report.digest,
            [len(operation.calls) for operation in recorded if isinstance(operation, FakeOperation)],
        )


def with_reduction(rank: Rank, *operations: FakeOperation) -> list[Any]:
    """Also one-shot, two-shot and gloo, between the ranks of this test; all of them call this before a fault can strike."""
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    patience = timedelta(seconds=2)
    return [*operations, FinalizeAllReduce(hidden_size=8, slots=2, dtype="fp32", group=dist.group.WORLD, patience=patience)]


def agreed(outcomes: list[Any]) -> dict[str, str]:
    """The one table that all ranks hold."""
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), outcomes
    assert len({outcome.value[3] for outcome in outcomes}) == 1, "digests differ"
    assert all(outcome.value[0] == outcomes[0].value[0] for outcome in outcomes)
    winners: dict[str, str] = outcomes[0].value[0]
    return winners


def one_operation(rank: Rank) -> list[FakeOperation]:
    return [FakeOperation("a", COSTS)]


def store_each(rank: Rank) -> dict[str, Any]:
    return {"store": str(rank.folder / f"store-{rank.index}")}


class Hanging(FakeOperation):
    """Tells the test when measuring begins."""

    rank: Rank

    def probe(self, num_tokens: int, spec: Any) -> Any:
        self.rank.mark("measuring")
        return super().probe(num_tokens, spec)
