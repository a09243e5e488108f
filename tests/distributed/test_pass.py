"""One pass over real processes, in every strategy, whatever ranks hold, lack, reject or have no room for: all end with the same winners."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from distributed.passes import (
    COSTS,
    POLICY,
    agreed,
    each_strategy,
    make_tuner,
    one_operation,
    store_each,
    table,
    tune,
    with_reduction,
)
from fakes import FakeOperation
from ranks import Rank, run_ranks

from moe_dist.distributed.plan import Offer, unpack_hits
from moe_dist.stores.codec import decode_entry
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner


@each_strategy
def test_two_ranks_choose_the_fastest_and_measure_nothing_the_second_time(strategy: str, tmp_path: Path) -> None:
    first = run_ranks(tune, 2, tmp_path, strategy, one_operation)
    assert agreed(first) == {"a 1": "quick", "a 2-4": "quick"}
    assert [outcome.value[1:3] for outcome in first] == [(6, 0)] * 2
    second = run_ranks(tune, 2, tmp_path, strategy, one_operation)
    assert agreed(second) == agreed(first)
    assert [outcome.value[1:3] for outcome in second] == [(0, 2)] * 2
    assert [outcome.value[4] for outcome in second] == [[0]] * 2, "a hit must run nothing"


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
                sent.extend(decode_entry(entry).key_digest for entry in unpack_hits(word))
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
