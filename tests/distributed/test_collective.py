"""Collective tactics: a call that a peer does not make is a hang, so their runs are counted, never raced, sharded or tuned apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.passes import COSTS, agreed, tune
from fakes import FakeOperation, FakeProbe
from ranks import Rank, run_ranks

from moe_dist.tuning.policy import STRATEGIES
from moe_dist.tuning.problem import ProbeSpec, Tactic

PATIENCE_S = 10.0  # the bounded wait that a real collective has on its device


class Meeting(FakeOperation):
    """Every call of an "all-" tactic waits until all ranks have made the same call: a barrier of files, bounded like a kernel's."""

    rank: Rank
    fault: str = ""
    patience_s: float = PATIENCE_S

    def probe(self, num_tokens: int, spec: ProbeSpec) -> FakeProbe:
        return MeetingProbe(self)


class MeetingProbe(FakeProbe):
    def bind(self, wanted: Tactic) -> Callable[[int], Tactic]:
        operation = self.operation
        assert isinstance(operation, Meeting)
        if wanted.collective and operation.fault == "prepare":
            raise ValueError("its arena can't be mapped")
        inner = super().bind(wanted)
        if not wanted.collective:
            return inner
        made = 0

        def run(index: int) -> Tactic:
            nonlocal made
            made += 1
            folder = operation.rank.folder
            (folder / f"{wanted['name']}-{made}-{operation.rank.index}").touch()
            deadline = time.monotonic() + operation.patience_s
            while any(not (folder / f"{wanted['name']}-{made}-{peer}").exists() for peer in range(operation.rank.size)):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"call {made} of {wanted['name']} waited for a peer in vain")
                time.sleep(0.0002)
            if operation.fault == "run" and made == 3:
                raise RuntimeError("the device reports an error flag")
            return inner(index)

        return run


def meet(rank: Rank, strategy: str, fault: str, costs: dict[str, float | str]) -> Any:
    operation = Meeting("a", costs)
    operation.rank = rank
    operation.fault = fault if rank.index == 1 else ""
    if fault == "run":  # a peer is waited for in vain, more than once
        operation.patience_s = 2.0
    return tune(rank, strategy, lambda rank: [operation], lambda rank: {"progress_timeout": 30.0})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_collective_tactic_that_is_fastest_wins_without_a_rank_left_waiting(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(meet, 2, tmp_path, strategy, "", {"plain": 60_000.0, "all-shot": 1000.0, "all-slow": 90_000.0})
    assert set(agreed(outcomes).values()) == {"all-shot"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_default_that_is_collective_is_timed_like_the_rest(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(meet, 2, tmp_path, strategy, "", {"all-gloo": 60_000.0, "all-shot": 1000.0})
    assert set(agreed(outcomes).values()) == {"all-shot"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_launches_what_one_cannot_prepare(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(meet, 2, tmp_path, strategy, "prepare", {**COSTS, "all-shot": 10.0})
    assert set(agreed(outcomes).values()) == {"quick"}
    assert max(outcome.seconds for outcome in outcomes) < PATIENCE_S, "a rank launched alone and waited for its peer"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failure_while_running_drops_the_tactic_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(meet, 2, tmp_path, strategy, "run", {**COSTS, "all-shot": 10.0}, deadline=90)
    assert set(agreed(outcomes).values()) == {"quick"}


def only_one_has_it(rank: Rank, strategy: str) -> Any:
    operation = Meeting("a", {**COSTS, "all-shot": 10.0})
    operation.rank = rank
    return tune(rank, strategy, lambda rank: [operation] if rank.index else [], lambda rank: {"progress_timeout": 30.0})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_collective_tactic_needs_every_rank(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(only_one_has_it, 2, tmp_path, strategy)
    assert set(agreed(outcomes).values()) == {"quick"}
