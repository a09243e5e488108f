"""One pass over real processes, happy and unhappy, in every strategy: survivors end with the same winners or the same error.

Where a rank meets a fault the pool holds finalize + all-reduce, too (`with_reduction`): tactics in which a divergence would hang.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch.distributed as dist
from fakes import FakeOperation
from ranks import Rank, Ranks, run_ranks, wait_for

from moe_dist.allreduce import FinalizeAllReduce
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import Offer
from moe_dist.errors import GroupError, PassAborted, TunerStateError
from moe_dist.stores.codec import decode_entry
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning import tune_pass
from moe_dist.tuning.context import autotune
from moe_dist.tuning.pass_terms import ProgressEvent
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


@each_strategy
def test_two_ranks_choose_the_fastest_and_measure_nothing_the_second_time(strategy: str, tmp_path: Path) -> None:
    first = run_ranks(tune, 2, tmp_path, strategy, one_operation)
    assert agreed(first) == {"a 1": "quick", "a 2-4": "quick"}
    assert [outcome.value[1:3] for outcome in first] == [(6, 0)] * 2
    second = run_ranks(tune, 2, tmp_path, strategy, one_operation)
    assert agreed(second) == agreed(first)
    assert [outcome.value[1:3] for outcome in second] == [(0, 2)] * 2
    assert [outcome.value[4] for outcome in second] == [[0]] * 2, "a hit must run nothing"


def store_each(rank: Rank) -> dict[str, Any]:
    return {"store": str(rank.folder / f"store-{rank.index}")}


def tune_alone_first(rank: Rank, strategy: str) -> Any:
    """Rank 0 is warm: it tuned the same problem alone into its own store. Rank 1 is cold."""
    if rank.index == 0:
        with Tuner(
            store=str(rank.folder / "store-0"), ladder=BucketLadder((1, 4)), policy=POLICY, deployment="other", device="cpu"
        ) as alone:
            alone.record(FakeOperation("a", COSTS))
            alone.run_pass()
    return tune(rank, strategy, one_operation, store_each)


@each_strategy
def test_one_rank_warm_and_the_other_cold_agree_on_the_hit(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(tune_alone_first, 2, tmp_path, strategy)
    assert agreed(outcomes) == {"a 1": "quick", "a 2-4": "quick"}
    assert [outcome.value[1:] for outcome in outcomes] == [(0, 2, outcomes[0].value[3], [0])] * 2


def warm_in_part(rank: Rank) -> Any:
    """Each rank's store holds another half of the entries; (digests of the keys whose entries it sent, hits, measured, digest)."""
    names, part = "abcd", BucketLadder((1,))
    with Tuner(store=str(rank.folder / f"store-{rank.index}"), ladder=part, policy=POLICY, deployment="other", device="cpu") as alone:
        for name in names[rank.index * 2 : rank.index * 2 + 2]:
            alone.record(FakeOperation(name, COSTS))
        alone.run_pass()
    with make_tuner(rank, "reduce", ladder=part, **store_each(rank)) as tuner:
        for name in names:
            tuner.record(FakeOperation(name, COSTS))
        sent, exchange = [], tuner.group.exchange

        def watched(step: str, word: bytes, **reads: Any) -> list[bytes]:
            if step == "hits":
                sent.extend(decode_entry(entry).key_digest for entry in msgpack.unpackb(word))
            return exchange(step, word, **reads)

        tuner.group.exchange = watched  # type: ignore[method-assign]
        reports = [tuner.run_pass(), tuner.run_pass()]
        return sent, [(report.hits, report.measured, report.digest) for report in reports]


def test_ranks_that_hold_different_entries_send_once_what_the_other_lacks(tmp_path: Path) -> None:
    outcomes = run_ranks(warm_in_part, 2, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert outcomes[0].value[1] == outcomes[1].value[1]
    assert [row[:2] for row in outcomes[0].value[1]] == [(4, 0)] * 2, "all four are hits, none is timed"
    sent = [outcome.value[0] for outcome in outcomes]
    assert [len(entries) for entries in sent] == [2, 2], "in the second pass all hold all: no bytes"
    assert not set(sent[0]) & set(sent[1])


def reject_on_rank_1(rank: Rank, strategy: str) -> Any:
    """Both hold the hit "quick", which rank 1 can no longer run."""
    objections = {"quick": "gone since the update"} if rank.index == 1 else {}
    return tune(rank, strategy, lambda rank: [FakeOperation("a", COSTS, objections=objections)])


@each_strategy
def test_a_hit_that_one_rank_rejects_is_tuned_anew_without_it(strategy: str, tmp_path: Path) -> None:
    run_ranks(tune, 2, tmp_path, strategy, one_operation)
    outcomes = run_ranks(reject_on_rank_1, 2, tmp_path, strategy)
    assert agreed(outcomes) == {"a 1": "plain", "a 2-4": "plain"}
    assert [outcome.value[1:3] for outcome in outcomes] == [(4, 0)] * 2


def fewer_on_rank_1(rank: Rank) -> list[Any]:
    names = ["a", "b"] if rank.index == 0 else ["b"]
    return with_reduction(rank, *(FakeOperation(name, COSTS) for name in names))


def none_on_rank_0(rank: Rank) -> list[Any]:
    operations = with_reduction(rank, FakeOperation("a", COSTS))
    return operations if rank.index else []  # the reduction, whose every tactic needs rank 0, stays untuned


@each_strategy
@pytest.mark.parametrize(("operations", "problems"), [(fewer_on_rank_1, "ab"), (none_on_rank_0, "a")])
def test_ranks_with_fewer_or_no_problems_abstain(strategy: str, operations: Any, problems: str, tmp_path: Path) -> None:
    outcomes = run_ranks(tune, 2, tmp_path, strategy, operations)
    assert set(agreed(outcomes)) == {f"{problem} {bucket}" for problem in problems for bucket in ("1", "2-4")}
    assert set(agreed(outcomes).values()) == {"quick"}


def unequal_shares(rank: Rank) -> list[Any]:
    """10 experts over 4 ranks: ranks 0 and 1 (3 experts) have a candidate that the others' shares don't offer."""
    costs = dict(COSTS) | ({"three": 100.0} if rank.index < 2 else {})
    return with_reduction(rank, FakeOperation("a", costs))


@each_strategy
def test_candidates_of_unequal_shares_make_one_schedule(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(tune, 4, tmp_path, strategy, unequal_shares)
    assert set(agreed(outcomes).values()) == {"quick"}, "a candidate that ranks 2 and 3 can't run must not win"


def tactic_oom_on_rank_1(rank: Rank) -> list[Any]:
    return with_reduction(rank, FakeOperation("a", COSTS if rank.index == 0 else {**COSTS, "quick": "oom"}))


def probe_oom_on_rank_1(rank: Rank) -> list[Any]:
    return with_reduction(rank, FakeOperation("a", COSTS, probe_fault="oom" if rank.index == 1 else ""))


@each_strategy
def test_out_of_memory_in_one_tactic_is_a_cell(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(tune, 2, tmp_path, strategy, tactic_oom_on_rank_1)
    assert set(agreed(outcomes).values()) == {"plain"}


@each_strategy
def test_out_of_memory_for_the_probe_is_no_exception(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(tune, 2, tmp_path, strategy, probe_oom_on_rank_1)
    # Rank 1 can time nothing: under reduce and reload no candidate ran on all; under shard none was timed by all.
    assert set(agreed(outcomes).values()) == {"untuned"}


def late(rank: Rank, strategy: str) -> Any:
    operations = with_reduction(rank, FakeOperation("a", COSTS))
    if rank.index == 1:
        time.sleep(2.0)
    return tune(rank, strategy, lambda rank: operations, lambda rank: {"progress_timeout": 10.0})


@each_strategy
def test_a_late_rank_is_waited_for(strategy: str, tmp_path: Path) -> None:
    assert set(agreed(run_ranks(late, 2, tmp_path, strategy)).values()) == {"quick"}


class Hanging(FakeOperation):
    """Tells the test when measuring begins."""

    rank: Rank

    def probe(self, num_tokens: int, spec: Any) -> Any:
        self.rank.mark("measuring")
        return super().probe(num_tokens, spec)


def stuck(rank: Rank, strategy: str, phase: str) -> Any:
    """Rank 1 never gets past `phase`; the test may also kill it there."""
    beside = with_reduction(rank)
    if rank.index == 1 and phase == "agree":
        rank.mark("measuring")
        time.sleep(3600)
    operation = Hanging("a", {**COSTS, "slow": "hang"} if rank.index == 1 else COSTS)
    operation.rank = rank if rank.index == 1 else Rank(0, 2, 0, rank.folder / "elsewhere")
    (rank.folder / "elsewhere").mkdir(exist_ok=True)
    return tune(rank, strategy, lambda rank: [operation, *beside], lambda rank: {"progress_timeout": 2.0})


@each_strategy
@pytest.mark.parametrize("phase", ["agree", "measure"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named_by_all_survivors(strategy: str, phase: str, fault: signal.Signals, tmp_path: Path) -> None:
    with Ranks(stuck, 3, tmp_path, strategy, phase) as ranks:
        ranks.wait("measuring")
        ranks.signal(1, fault)
        started = time.monotonic()
        survivors = [ranks.join_one(index, 30.0) for index in (0, 2)]
        assert time.monotonic() - started < 20, "the deadline is 2 s without progress"
    assert [(outcome.error, outcome.culprits) for outcome in survivors] == [("RankLost", (1,))] * 2
    assert survivors[0].message == survivors[1].message
    assert "rank 1 lost in pass 1, step " in survivors[0].message
    assert "no progress for 2 s" in survivors[0].message
    # Nothing was stored: a restart heals.
    assert set(agreed(run_ranks(tune, 3, tmp_path, strategy, one_operation)).values()) == {"quick"}


def stopped_and_continued(rank: Rank, strategy: str) -> Any:
    operation = Hanging("a", {**COSTS, "slow": 2_000_000.0} if rank.index == 1 else COSTS)
    operation.rank = rank if rank.index == 1 else Rank(0, 2, 0, rank.folder / "elsewhere")
    (rank.folder / "elsewhere").mkdir(exist_ok=True)
    return tune(rank, strategy, lambda rank: with_reduction(rank, operation), lambda rank: {"progress_timeout": 2.5})


@each_strategy
def test_a_rank_that_was_stopped_too_long_learns_that_it_was_lost(strategy: str, tmp_path: Path) -> None:
    with Ranks(stopped_and_continued, 2, tmp_path, strategy) as ranks:
        ranks.wait("measuring")
        ranks.signal(1, signal.SIGSTOP)
        survivor = ranks.join_one(0, 30.0)
        ranks.signal(1, signal.SIGCONT)
        lost = ranks.join_one(1, 30.0)
    assert survivor.error == lost.error == "RankLost"
    assert survivor.culprits == lost.culprits == (1,)


def slow_but_alive(rank: Rank, strategy: str) -> Any:
    """One candidate of rank 1 takes longer than the progress timeout in all, but it moves from candidate to candidate."""
    slow = {"plain": 400_000.0, "quick": 300_000.0, "slow": 900_000.0}
    operation = FakeOperation("a", slow if rank.index == 1 else COSTS)
    settings = {"progress_timeout": 3.0, "ladder": BucketLadder((1,))}
    return tune(rank, strategy, lambda rank: with_reduction(rank, operation), lambda rank: settings)


@each_strategy
def test_nobody_is_declared_dead_while_it_works(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(slow_but_alive, 2, tmp_path, strategy)
    assert set(agreed(outcomes).values()) == {"quick"}
    assert max(outcome.seconds for outcome in outcomes) > 3.0


def outlasts_the_cap(rank: Rank, strategy: str) -> Any:
    """Rank 1 moves every 300 ms, and needs 8 s or more in all: without a cap the pass would end then."""
    costs = dict.fromkeys(("plain", "quick"), 300_000.0) if rank.index == 1 else {"plain": 1000.0, "quick": 1000.0}
    operations = with_reduction(rank, FakeOperation("a", costs))
    return tune(rank, strategy, lambda rank: operations, lambda rank: {"progress_timeout": 30.0, "cap": 4.0})


@each_strategy
def test_the_cap_ends_a_pass_that_still_moves(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(outlasts_the_cap, 2, tmp_path, strategy)
    ended = [(outcome.error or "a table", outcome.culprits, round(outcome.seconds)) for outcome in outcomes]
    assert [how[:2] for how in ended] == [("RankLost", (1,))] * 2, (
        f"awaited was RankLost(1) at the cap of 4 s; (how, who, seconds): {ended}"
    )
    assert "the pass outlasted its cap of 4 s" in outcomes[0].message


def leaves(rank: Rank, strategy: str, when: str) -> Any:
    operation, reduction = with_reduction(rank, FakeOperation("a", COSTS))
    with make_tuner(rank, strategy, progress_timeout=30.0) as tuner:
        tuner.record(operation)
        tuner.record(reduction)
        if rank.index == 1:
            if when == "before":
                raise KeyError("calibration file")
            operation.probe = lambda num_tokens, spec: {}["missing"]  # type: ignore[method-assign]
        return table(tuner.run_pass())


@each_strategy
@pytest.mark.parametrize("when", ["before", "measure"])
def test_a_rank_that_leaves_by_an_exception_frees_its_peers_at_once(strategy: str, when: str, tmp_path: Path) -> None:
    outcomes = run_ranks(leaves, 2, tmp_path, strategy, when)
    assert outcomes[1].error == "KeyError", "its own exception propagates"
    assert (outcomes[0].error, outcomes[0].culprits) == ("RankWithdrawn", (1,))
    assert "rank 1 left the pass: KeyError" in outcomes[0].message
    assert outcomes[0].seconds < 20, "long before the 30 s deadline"


def different_settings(rank: Rank, strategy: str) -> Any:
    return tune(rank, strategy, one_operation, lambda rank: {"objective": "mean" if rank.index == 1 else "max"})


@each_strategy
def test_settings_that_differ_are_named_with_ranks(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(different_settings, 3, tmp_path, strategy)
    assert {(outcome.error, outcome.culprits, outcome.message) for outcome in outcomes} == {
        (
            "SettingsDiffer",
            (1,),
            "settings differ between ranks: objective is 'max' on rank 0, 2 and 'mean' on rank 1; start all ranks alike",
        )
    }


def other_version(rank: Rank, strategy: str, mixed: bool) -> Any:
    versions = {"flashinfer": "0.7.2" if rank.index == 0 else "0.7.1"}
    return tune(rank, strategy, one_operation, lambda rank: {"versions": versions, "mixed_environments": mixed})


@each_strategy
def test_environments_that_differ_are_an_error_unless_allowed(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(other_version, 2, tmp_path / "refused", strategy, False)
    assert {outcome.error for outcome in outcomes} == {"SettingsDiffer"}
    assert (
        "environments differ between ranks: backends is (('flashinfer', '0.7.2'),) on rank 0 and (('flashinfer', '0.7.1'),) on rank 1"
        in outcomes[0].message
    )
    assert set(agreed(run_ranks(other_version, 2, tmp_path / "allowed", strategy, True)).values()) == {"quick"}
    again = run_ranks(other_version, 2, tmp_path / "allowed", strategy, True)
    assert [outcome.value[1:3] for outcome in again] == [(0, 2)] * 2, "one entry per environment was published"


def test_stores_that_are_not_shared_are_found_and_healed(tmp_path: Path) -> None:
    first = run_ranks(tune, 2, tmp_path, "reload", one_operation, store_each)
    assert set(agreed(first).values()) == {"quick"}
    second = run_ranks(tune, 2, tmp_path, "reload", one_operation, store_each)
    assert agreed(second) == agreed(first)
    assert [outcome.value[1:3] for outcome in second] == [(0, 2)] * 2


def out_of_budget(rank: Rank, strategy: str) -> Any:
    return tune(rank, strategy, one_operation, lambda rank: {"budget": timedelta(milliseconds=1)})


@pytest.mark.parametrize("strategy", ["reduce", "shard"])
def test_the_budget_ends_measuring_on_all_ranks_alike(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(out_of_budget, 2, tmp_path, strategy)
    assert agreed(outcomes)["a 2-4"] == "untuned", "the second bucket came after the budget: an incomplete candidate can't win"


def slowest_sets_the_pace(rank: Rank, strategy: str, objective: str) -> Any:
    """even: 80 ms on both; lopsided: 4 ms on rank 0, 110 ms on rank 1. Mean 57 < 80, maximum 110 > 80: far enough for a busy machine."""
    costs = {"even": 80_000.0, "lopsided": 4_000.0 if rank.index == 0 else 110_000.0}
    return tune(
        rank, strategy, lambda rank: [FakeOperation("a", costs)], lambda rank: {"objective": objective, "ladder": BucketLadder((1,))}
    )


@pytest.mark.parametrize(("objective", "winner"), [("max", "even"), ("mean", "lopsided")])
def test_objective_is_maximum_or_mean_over_ranks(objective: str, winner: str, tmp_path: Path) -> None:
    assert agreed(run_ranks(slowest_sets_the_pace, 2, tmp_path, "reduce", objective)) == {"a 1": winner}


def calls_otherwise(rank: Rank, call: str) -> Any:
    """Rank 1 reloads, or closes, where its peers run a second pass; (error, culprits, winners that are served) of each."""
    with make_tuner(rank, "reduce", ladder=BucketLadder((1,)), progress_timeout=30.0) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        before = tuner.epoch
        if rank.index == 1 and call == "close":
            return None
        started = time.monotonic()
        try:
            tuner.reload() if rank.index == 1 else tuner.run_pass()
        except GroupError as error:
            assert tuner.epoch is before
            assert time.monotonic() - started < 20, "the deadline is 30 s"
            return type(error).__name__, error.ranks, str(error)


def test_a_reload_beside_a_pass_is_an_error_that_says_so_to_all(tmp_path: Path) -> None:
    outcomes = run_ranks(calls_otherwise, 3, tmp_path, "reload")
    assert {outcome.value[:2] for outcome in outcomes} == {("CallsDiffer", (1,))}, outcomes
    assert "rank 1 in reload, step reload-problems" in outcomes[0].value[2]
    assert "the rest in run_pass, step agree-1" in outcomes[0].value[2]


def test_a_pass_without_a_rank_that_closed_its_tuner_ends_at_once(tmp_path: Path) -> None:
    outcomes = run_ranks(calls_otherwise, 3, tmp_path, "close")
    assert outcomes[1].value is None
    assert {outcome.value for outcome in (outcomes[0], outcomes[2])} == {
        (
            "RankWithdrawn",
            (1,),
            "rank 1 closed its tuner before pass 2 (run_pass, step agree-1); all ranks of a group make the same calls",
        )
    }


def joins(rank: Rank) -> Any:
    with Tuner(store=str(rank.folder / "store"), deployment="test", device="cpu") as joiner:
        adopted = joiner.reload()
        return adopted, joiner.epoch.number, joiner.epoch.digest


@each_strategy
def test_a_joiner_adopts_the_running_epoch_alone(strategy: str, tmp_path: Path) -> None:
    served = run_ranks(tune, 2, tmp_path, strategy, one_operation)
    joined = run_ranks(joins, 1, tmp_path)
    assert joined[0].value == (True, 1, served[0].value[3])


def reloads_from_a_newer_store(rank: Rank) -> Any:
    """Rank 1 finds a newer epoch than the leader does, as when another job publishes between two ranks' looks."""
    folder = str(rank.folder / ("store" if rank.index == 0 else "newer"))
    if rank.index == 1:
        with Tuner(store=folder, deployment="test", device="cpu", policy=POLICY, ladder=BucketLadder((1, 4))) as other:
            for name in "abc":
                other.record(FakeOperation(name, COSTS))
                other.run_pass()
            assert other.epoch.number == 3
    with make_tuner(rank, "reduce", store=folder, progress_timeout=20.0) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return tuner.reload(), tuner.epoch.number, tuner.epoch.digest


def test_a_rank_that_finds_a_newer_epoch_adopts_its_leaders(tmp_path: Path) -> None:
    served = run_ranks(tune, 2, tmp_path, "reduce", one_operation)
    outcomes = run_ranks(reloads_from_a_newer_store, 2, tmp_path)
    assert [outcome.value for outcome in outcomes] == [(True, 1, served[0].value[3])] * 2, outcomes


def stage_of_a_pipeline(rank: Rank) -> Any:
    """Ranks 0 and 1 are stage a, 2 and 3 stage b, with one deployment name and one store; all tune at once, then each stage reloads.

    ((problems of its epoch, digest) before and after the reload, and of a joiner that records nothing but its stage's problem).
    """
    stage, store = "ab"[rank.index // 2], dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    names = [rank.index // 2 * 2 + other for other in range(2)]
    deadlines = {"progress_timeout": timedelta(seconds=20), "cap": timedelta(seconds=60)}
    group = RankGroup(store, rank.index % 2, 2, names=names, scope=f"stage-{stage}", **deadlines)
    settings: dict[str, Any] = {
        "store": str(rank.folder / "store"), "deployment": "one", "device": "cpu", "ladder": BucketLadder((1,)), "policy": POLICY
    }  # fmt: skip

    def served(tuner: Tuner) -> tuple[set[Any], str]:
        return {cell.problem.fields[0][1] for cell in tuner.epoch.winners}, tuner.epoch.digest

    with Tuner(group=group, **settings) as tuner:
        tuner.record(FakeOperation(stage, COSTS))
        tuner.run_pass()
        tuned = served(tuner)
        rank.mark(f"tuned-{rank.index}")
        for other in range(4):
            rank.wait(f"tuned-{other}")
        assert tuner.reload()
        reloaded = served(tuner)
    with Tuner(**settings) as joiner:
        joiner.record(FakeOperation(stage, COSTS))
        assert joiner.reload()
        return stage, tuned, reloaded, served(joiner)


def test_stages_of_one_deployment_keep_their_own_epochs(tmp_path: Path) -> None:
    outcomes = run_ranks(stage_of_a_pipeline, 4, tmp_path)
    assert [outcome.error for outcome in outcomes] == [""] * 4, outcomes
    for outcome in outcomes:
        stage, tuned, reloaded, joined = outcome.value
        assert tuned == reloaded == joined
        assert tuned[0] == {stage}
    assert len({outcome.value[1][1] for outcome in outcomes}) == 2


def reloads(rank: Rank) -> Any:
    """The two ranks' stores differ: only the leader's holds the epoch."""
    with make_tuner(rank, "reduce", store=str(rank.folder / ("store" if rank.index == 0 else "nothing"))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return tuner.reload(), tuner.epoch.number, tuner.epoch.digest


def test_a_group_reloads_what_its_leader_holds(tmp_path: Path) -> None:
    served = run_ranks(tune, 2, tmp_path, "reduce", one_operation)
    outcomes = run_ranks(reloads, 2, tmp_path)
    assert [outcome.value for outcome in outcomes] == [(True, 1, served[0].value[3])] * 2


def reloads_elsewhere(rank: Rank, field: str, other: Any) -> Any:
    """Rank 1 comes back on another machine: (what each reload gave, whether the epoch is still the one before)."""
    with make_tuner(rank, "reduce", ladder=BucketLadder((1,))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        before = tuner.epoch
        if rank.index == 1:
            tuner.environment = dataclasses.replace(tuner.environment, **{field: other})
        return tuner.reload(), tuner.epoch is before, tuner.epoch.digest


# What an agreement refuses, a reload refuses, too: no rank adopts what one of them can't serve.
@pytest.mark.parametrize(("field", "other"), [("device_name", "another GPU"), ("backends", (("flashinfer", "0.7.2"),))])
def test_no_rank_adopts_an_epoch_that_one_can_not_serve(field: str, other: Any, tmp_path: Path) -> None:
    outcomes = run_ranks(reloads_elsewhere, 3, tmp_path, field, other)
    assert [outcome.error for outcome in outcomes] == [""] * 3, outcomes
    assert [outcome.value[:2] for outcome in outcomes] == [(False, True)] * 3
    assert len({outcome.value[2] for outcome in outcomes}) == 1


@pytest.mark.parametrize("step", ["agree-1", "measure-0-0", "decide"])
@pytest.mark.parametrize("strategy", ["reduce", "reload"])
def test_late_words_of_a_former_pass_change_nothing_in_any_phase(strategy: str, step: str, tmp_path: Path) -> None:
    outcomes = run_ranks(hears_late_words, 2, tmp_path, strategy, step)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert {outcome.value for outcome in outcomes} == {("quick", 2)}


def hears_late_words(rank: Rank, strategy: str, step: str) -> Any:
    """In its second pass rank 1 repeats all that it could have said in the first one, before it says its word of `step`."""
    with make_tuner(rank, strategy, ladder=BucketLadder((1,))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        tuner.record(FakeOperation("b", COSTS))
        meet = tuner.group._meet

        def late(at: str, said: bytes, conclude: Any) -> bytes:
            if rank.index == 1 and (at == step or (at == "reload-published" and step.startswith("measure"))):
                for word in range(1, 9):
                    for tail in ("0", "1", "all", "bytes/0", "bytes/1"):
                        tuner.group._store.set(f"{tuner.group._base}/1/{word:06d}/{tail}", "late")
                # As a verdict is said: the leader may not have read the first pass's yet.
                tuner.group._store.compare_set(f"{tuner.group._base}/1/verdict", "", "late")
                rank.mark("late")
            return meet(at, said, conclude)

        tuner.group._meet = late  # type: ignore[method-assign]
        report = tuner.run_pass()
        assert (rank.folder / "mark-late").exists()
        return table(report)["b 1"], report.epoch


def two_on_one_group(rank: Rank) -> Any:
    group = rank.group()
    try:
        rank.group()
    finally:
        group.close()


def test_two_open_tuners_on_one_group_are_refused(tmp_path: Path) -> None:
    outcomes = run_ranks(two_on_one_group, 2, tmp_path)
    assert {outcome.error for outcome in outcomes} == {"TunerStateError"}
    assert "rank 1 of group 'group' has an open tuner already; close that one first" in outcomes[1].message


def refused_alone(rank: Rank) -> Any:
    """After a first pass rank 1 alone asks for a second tuner while its first is open. What the next tuner of all ranks comes to."""
    with make_tuner(rank, "reduce", ladder=BucketLadder((1,))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        if rank.index == 1:
            with pytest.raises(TunerStateError, match="rank 1 of group 'group' has an open tuner already"):
                make_tuner(rank, "reduce")
    return tune(rank, "reduce", one_operation)


def test_a_tuner_that_one_rank_alone_was_refused_spoils_no_later_one(tmp_path: Path) -> None:
    assert set(agreed(run_ranks(refused_alone, 3, tmp_path)).values()) == {"quick"}


def over_gloo(rank: Rank) -> Any:
    """The rendezvous is the process group's own TCPStore, which lives in rank 0; that rank is killed while it measures."""
    port = rank.folder / "port"
    if rank.index == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
    else:
        wait_for(port)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    operation = Hanging("a", {**COSTS, "slow": "hang"} if rank.index == 0 else COSTS)
    operation.rank = rank if rank.index == 0 else Rank(0, 2, 0, rank.folder / "elsewhere")
    (rank.folder / "elsewhere").mkdir(exist_ok=True)
    with Tuner(
        group=dist.group.WORLD, policy=POLICY, ladder=BucketLadder((1,)), device="cpu", progress_timeout=timedelta(seconds=20)
    ) as tuner:
        tuner.record(operation)
        return table(tuner.run_pass())


def test_the_rank_that_serves_the_rendezvous_is_named_when_it_dies(tmp_path: Path) -> None:
    with Ranks(over_gloo, 3, tmp_path) as ranks:
        ranks.wait("measuring")
        ranks.kill(0)
        survivors = [ranks.join_one(index, 30.0) for index in (1, 2)]
    assert [(outcome.error, outcome.culprits) for outcome in survivors] == [("RendezvousLost", (0,))] * 2
    assert "the rendezvous store, which rank 0 serves, can't be reached" in survivors[0].message


def concludes_differently(rank: Rank, strategy: str) -> Any:
    """Rank 1 has a bug, or a flipped bit: from the same words it picks another winner."""
    if rank.index == 1:
        right = tune_pass.TunePass._conclude

        def wrong(self: Any, agreed: Any, decided: Any, entries: Any) -> Any:
            swapped = [
                dataclasses.replace(cell, winner=dataclasses.replace(cell.winner, tactic=cell.default)) if cell.winner else cell
                for cell in decided
            ]
            return right(self, agreed, swapped, entries)

        tune_pass.TunePass._conclude = wrong  # type: ignore[method-assign]
    with make_tuner(rank, strategy) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        try:
            tuner.run_pass()
        except PassAborted:
            assert tuner.epoch.winners == {}, "the previous epoch stays"
            raise


@each_strategy
def test_ranks_that_conclude_differently_abort_alike_and_change_nothing(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(concludes_differently, 3, tmp_path, strategy)
    assert {(outcome.error, outcome.culprits) for outcome in outcomes} == {("PassAborted", (1,))}
    assert "winner tables differ: rank 1 holds another than the rest" in outcomes[0].message
    assert FilesystemStore(tmp_path / "store").list("epochs") == []


def offers_of_a_serving_rank(rank: Rank) -> Any:
    """(hit epochs before a pass, after it): what is served is offered with the number of its epoch, so that it is preferred."""
    with make_tuner(rank, "reduce", ladder=BucketLadder((1,))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        seen = []
        exchange = tuner.group.exchange

        def watched(step: str, word: bytes, **reads: Any) -> list[bytes]:
            if step == "agree-1":
                seen.extend(offer.hit_epoch for offer in Offer.from_bytes(word).cells.values())
            return exchange(step, word, **reads)

        tuner.group.exchange = watched  # type: ignore[method-assign]
        tuner.run_pass()
        tuner.run_pass()
        return seen


def test_what_is_served_is_offered_with_its_epoch(tmp_path: Path) -> None:
    outcomes = run_ranks(offers_of_a_serving_rank, 2, tmp_path)
    assert [outcome.value for outcome in outcomes] == [[0, 1]] * 2, outcomes


class Lenient(FakeOperation):
    """Passes every tactic: this rank's share hides the fault of "wrong"."""

    def probe(self, num_tokens: int, spec: Any) -> Any:
        probe = super().probe(num_tokens, spec)
        probe.check = lambda run: None
        return probe


def wrong_on_rank_0(rank: Rank, strategy: str, fault: str) -> Any:
    # Rank 1 is the slower one: what it writes would be the last word in a shared store.
    operation = (
        FakeOperation("a", {"plain": 30_000.0, "wrong": 100.0}) if rank.index == 0 else Lenient("a", {"plain": 200_000.0, "wrong": 100.0})
    )
    store = str(rank.folder / (f"store-{rank.index}" if fault == "apart" else "store"))
    with make_tuner(rank, strategy, store=store, ladder=BucketLadder((1,)), progress_timeout=4.0) as tuner:
        tuner.record(operation)
        if fault == "die" and rank.index == 0:
            exchange = tuner.group.exchange

            def dying(step: str, word: bytes, **reads: Any) -> list[bytes]:
                if step == "spread-key":
                    os._exit(9)
                return exchange(step, word, **reads)

            tuner.group.exchange = dying  # type: ignore[method-assign]
        return table(tuner.run_pass()), 0, 0, tuner.epoch.digest


def test_reload_stores_no_winner_that_another_rank_rejected(tmp_path: Path) -> None:
    """With a store each, nobody would overwrite it: at the next start it would be a hit, and win by its digest or by its rank."""
    run_ranks(wrong_on_rank_0, 2, tmp_path, "reload", "apart")
    stored = [decode_entry(path.read_bytes()).tactic["name"] for path in tmp_path.glob("store-*/entries/*/*")]
    assert stored == ["plain"], "the leader's, after the commit"
    assert agreed(run_ranks(wrong_on_rank_0, 2, tmp_path, "reload", "apart")) == {"a 1": "plain"}


def test_reload_stores_no_winner_of_a_pass_that_was_aborted(tmp_path: Path) -> None:
    outcomes = run_ranks(wrong_on_rank_0, 2, tmp_path, "reload", "die")
    assert [outcome.error for outcome in outcomes] == ["killed", "RankLost"]
    assert agreed(run_ranks(wrong_on_rank_0, 2, tmp_path, "reduce", "")) == {"a 1": "plain"}


def fails_after_the_commit(rank: Rank, strategy: str) -> Any:
    """(the error that propagated, the digest that is served)."""

    def on_progress(event: ProgressEvent) -> None:
        if event.phase == "done" and rank.index == 0:
            raise BrokenPipeError("the terminal is gone")

    with make_tuner(rank, strategy, ladder=BucketLadder((1,)), on_progress=on_progress) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        try:
            tuner.run_pass()
        except BrokenPipeError as error:
            return str(error), tuner.epoch.digest, len(tuner.epoch.winners)
        return "", tuner.epoch.digest, len(tuner.epoch.winners)


@each_strategy
def test_an_error_after_the_commit_leaves_the_new_epoch_served(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(fails_after_the_commit, 2, tmp_path, strategy)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert [outcome.value[0] for outcome in outcomes] == ["the terminal is gone", ""]
    assert outcomes[0].value[1:] == outcomes[1].value[1:]
    assert outcomes[0].value[2] == 1


def two_blocks(rank: Rank) -> Any:
    """Two autotune blocks, one after the other, on one group; then the first one's tuner still reloads."""
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    tuners = []
    for name in "ab":
        with autotune(
            store=str(rank.folder / "store"), group=dist.group.WORLD, policy=POLICY, ladder=BucketLadder((1,)), device="cpu"
        ) as tuner:
            tuner.record(FakeOperation(name, COSTS))
        tuners.append(tuner)
    return [len(tuner.epoch.winners) for tuner in tuners], tuners[0].reload()


def test_one_autotune_block_may_follow_another(tmp_path: Path) -> None:
    outcomes = run_ranks(two_blocks, 2, tmp_path)
    assert [outcome.value for outcome in outcomes] == [([1, 1], True)] * 2, outcomes


def fails_to_open(rank: Rank) -> Any:
    """The first tuner can't be made: its journal lies in the home of a user who does not exist. Then another on the same ranks."""
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    try:
        Tuner(group=dist.group.WORLD, journal="~no-such-user/journal", device="cpu")
    except RuntimeError as error:
        refused = str(error)
    with Tuner(
        group=dist.group.WORLD, policy=POLICY, ladder=BucketLadder((1,)), device="cpu", progress_timeout=timedelta(seconds=20)
    ) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return refused, table(tuner.run_pass())


def test_a_tuner_that_failed_to_open_keeps_no_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(fails_to_open, 2, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert all("home directory" in outcome.value[0] for outcome in outcomes)
    assert [outcome.value[1] for outcome in outcomes] == [{"a 1": "quick"}] * 2
