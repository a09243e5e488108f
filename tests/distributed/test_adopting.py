"""How a committed epoch gets from a store to joiners, groups and the stages of a pipeline, over real processes."""

from __future__ import annotations

import dataclasses
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.passes import (
    COSTS,
    POLICY,
    each_strategy,
    make_tuner,
    one_operation,
    tune,
)
from fakes import FakeOperation
from ranks import Rank, run_ranks

from moe_dist.distributed.group import RankGroup
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner


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


def reloads_with_less_room(rank: Rank) -> Any:
    """Rank 1 has less workspace than the winner needs."""
    with make_tuner(rank, "reduce", workspace_limit=10 if rank.index == 1 else None) as tuner:
        tuner.record(FakeOperation("a", COSTS, workspaces={"quick": 11}))
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("moe_dist.tuning").addHandler(handler)
        return tuner.reload(), len(tuner.epoch.winners), said


def test_no_rank_adopts_a_winner_that_one_has_no_room_for(tmp_path: Path) -> None:
    run_ranks(tune, 2, tmp_path, "reduce", one_operation)
    outcomes = run_ranks(reloads_with_less_room, 3, tmp_path)
    assert [outcome.error for outcome in outcomes] == [""] * 3, outcomes
    for outcome in outcomes:
        adopted, winners, said = outcome.value
        assert (adopted, winners, len(said)) == (False, 0, 1)
        assert said[0].startswith("the committed epoch is not adopted: rank 1: ")
        assert said[0].endswith(": fake(name=quick): needs 11 bytes of workspace; the limit is 10")


# What an agreement refuses, a reload refuses, too: no rank adopts what one of them can't serve.
@pytest.mark.parametrize(("field", "other"), [("device_name", "another GPU"), ("backends", (("flashinfer", "0.7.2"),))])
def test_no_rank_adopts_an_epoch_that_one_can_not_serve(field: str, other: Any, tmp_path: Path) -> None:
    outcomes = run_ranks(reloads_elsewhere, 3, tmp_path, field, other)
    assert [outcome.error for outcome in outcomes] == [""] * 3, outcomes
    assert [outcome.value[:2] for outcome in outcomes] == [(False, True)] * 3
    assert len({outcome.value[2] for outcome in outcomes}) == 1
