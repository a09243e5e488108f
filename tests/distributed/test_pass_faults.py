"""A pass in which a rank dies, stops, is slow, leaves, differs or calls something else: the same typed error on all, or the same table."""

from __future__ import annotations

import dataclasses
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.passes import (
    COSTS,
    POLICY,
    Hanging,
    agreed,
    each_strategy,
    make_tuner,
    one_operation,
    table,
    tune,
    with_reduction,
)
from fakes import FakeOperation
from ranks import Rank, Ranks, run_ranks, wait_for

from moe_dist.bench.struck import remembered
from moe_dist.errors import GroupError, PassAborted
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning import tune_pass
from moe_dist.tuning.pass_terms import ProgressEvent
from moe_dist.tuning.problem import BucketLadder, ProbeSpec
from moe_dist.tuning.tuner import Tuner


def late(rank: Rank, strategy: str) -> Any:
    operations = with_reduction(rank, FakeOperation("a", COSTS))
    if rank.index == 1:
        time.sleep(2.0)
    return tune(rank, strategy, lambda rank: operations, lambda rank: {"progress_timeout": 10.0})


@each_strategy
def test_a_late_rank_is_waited_for(strategy: str, tmp_path: Path) -> None:
    assert set(agreed(run_ranks(late, 2, tmp_path, strategy)).values()) == {"quick"}


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


OTHERS: dict[str, Any] = {"objective": "mean", "probe": ProbeSpec(seed=1)}


def different_settings(rank: Rank, strategy: str) -> Any:
    return tune(rank, strategy, one_operation, lambda rank: OTHERS if rank.index == 1 else {})


@each_strategy
def test_settings_that_differ_are_named_with_ranks(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(different_settings, 3, tmp_path, strategy)
    assert {(outcome.error, outcome.culprits, outcome.message) for outcome in outcomes} == {
        (
            "SettingsDiffer",
            (1,),
            "settings differ between ranks: objective is 'max' on rank 0, 2 and 'mean' on rank 1; "
            "probe_seed is 0 on rank 0, 2 and 1 on rank 1; start all ranks alike",
        )
    }


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


@pytest.mark.parametrize("step", ["agree-1", "measure-0-0", "decide"])
@pytest.mark.parametrize("strategy", ["reduce", "reload"])
def test_late_words_of_a_former_pass_change_nothing_in_any_phase(strategy: str, step: str, tmp_path: Path) -> None:
    outcomes = run_ranks(hears_late_words, 2, tmp_path, strategy, step)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert {outcome.value for outcome in outcomes} == {("quick", 2)}


def hears_late_words(rank: Rank, strategy: str, step: str) -> Any:
    """In its second pass rank 1 repeats all that it said in the first one, its end too, before it says its word of `step`."""
    with make_tuner(rank, strategy, ladder=BucketLadder((1,))) as tuner:
        rendezvous = tuner.group._rendezvous
        tuner.record(FakeOperation("a", COSTS))
        with remembered(tuner.group) as former:
            tuner.run_pass()
        assert former, "a rank that said nothing has nothing to repeat"
        tuner.record(FakeOperation("b", COSTS))
        meet = tuner.group._meet

        def late(at: str, word: bytes, conclude: Any) -> bytes:
            if rank.index == 1 and (at == step or (at == "reload-published" and step.startswith("measure"))):
                for key, value in former.items():
                    rendezvous.set(key, value)
                # As a verdict is said: the leader may not have read the first pass's yet.
                rendezvous._store.compare_set(f"{tuner.group._base}/1/verdict", "", "late")
                rank.mark("late")
            return meet(at, word, conclude)

        tuner.group._meet = late  # type: ignore[method-assign]
        report = tuner.run_pass()
        assert (rank.folder / "mark-late").exists()
        return table(report)["b 1"], report.epoch


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
