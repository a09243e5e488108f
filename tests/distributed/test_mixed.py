"""Groups whose ranks differ: in environment, where that is allowed, and in software version, where it never is; over real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
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
)
from fakes import FakeOperation
from ranks import Rank, run_ranks

from moe_dist.distributed import group as group_module
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner
from moe_dist.versions import code_version

# -- environments ------------------------------------------------------------------------------------------------------------


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


def of_two_kinds(rank: Rank) -> dict[str, Any]:
    """Ranks 0 and 2 have one version of a foreign backend, rank 1 another."""
    return {"versions": {"foreign": str(rank.index % 2)}, "mixed_environments": True}


def tunes_and_reloads(rank: Rank, strategy: str, apart: bool) -> Any:
    """(what it serves after the pass, whether it reloads that, what it serves then)."""
    stores = store_each(rank) if apart else {}
    with make_tuner(rank, strategy, **of_two_kinds(rank), **stores) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        report = tuner.run_pass()
        return table(report), tuner.reload(), tuner.epoch.digest == report.digest, report.digest


def reloads_only(rank: Rank, strategy: str, apart: bool) -> Any:
    stores = store_each(rank) if apart else {}
    with make_tuner(rank, strategy, **of_two_kinds(rank), **stores) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return tuner.reload(), tuner.epoch.number, tuner.epoch.digest


def joins_with_version(rank: Rank, version: str) -> Any:
    with Tuner(store=str(rank.folder / "store"), deployment="test", device="cpu", versions={"foreign": version}) as joiner:
        return joiner.reload(), joiner.epoch.digest


@each_strategy
@pytest.mark.parametrize("apart", [False, True])  # a store each: the epoch comes from the leader's
def test_a_group_of_mixed_environments_adopts_its_epoch(strategy: str, apart: bool, tmp_path: Path) -> None:
    first = run_ranks(tunes_and_reloads, 3, tmp_path, strategy, apart)
    assert [outcome.error for outcome in first] == [""] * 3, first
    digest = first[0].value[3]
    assert [outcome.value for outcome in first] == [({"a 1": "quick", "a 2-4": "quick"}, True, True, digest)] * 3
    # Started again, it adopts what it left.
    again = run_ranks(reloads_only, 3, tmp_path, strategy, apart)
    assert [outcome.value for outcome in again] == [(True, 1, digest)] * 3, again
    if not apart:  # and so does a joiner of either kind, but none of a third
        joined = [run_ranks(joins_with_version, 1, tmp_path, version)[0].value for version in "012"]
        assert [adopted for adopted, _ in joined] == [True, True, False]
        assert joined[0] == joined[1] == (True, digest)


def tunes_alone_first(rank: Rank, strategy: str) -> Any:
    """The kind of ranks 0 and 2 has tuned the problem without the other kind. (first pass, second pass of the mixed group)."""
    if rank.index == 0:
        versions = {"foreign": "0"}
        with Tuner(store=str(rank.folder / "store"), ladder=BucketLadder((1, 4)), policy=POLICY, device="cpu", versions=versions) as alone:
            alone.record(FakeOperation("a", COSTS))
            alone.run_pass()
        rank.mark("tuned")
    rank.wait("tuned")
    with make_tuner(rank, strategy, **of_two_kinds(rank)) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return [(report.hits, report.measured) for report in (tuner.run_pass(), tuner.run_pass())]


@each_strategy
def test_what_one_environment_tuned_alone_is_no_hit_for_another(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(tunes_alone_first, 3, tmp_path, strategy)
    assert [outcome.value for outcome in outcomes] == [[(0, 6), (2, 0)]] * 3, outcomes


# -- versions ----------------------------------------------------------------------------------------------------------------


def of_another_version(rank: Rank, mixed: bool, direct: bool) -> Any:
    """The last rank has other code of moe_dist on its disk. direct: the group is made here, not by the tuner."""
    if rank.index == rank.size - 1:
        group_module.code_version = lambda: "0.0.9+0badc0de"
    if direct:
        group: Any = rank.group(progress_timeout=60.0)
    else:
        store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
        group = dist.group.WORLD
    with Tuner(group=group, policy=POLICY, ladder=BucketLadder((1,)), device="cpu", mixed_environments=mixed) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return table(tuner.run_pass())


# Environments may be allowed to differ, and the group may be made by the tuner or its caller: other code is never allowed.
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_a_rank_of_another_software_version_is_named_by_all_with_both_versions(mixed: bool, direct: bool, tmp_path: Path) -> None:
    outcomes = run_ranks(of_another_version, 3, tmp_path, mixed, direct, deadline=50.0)  # less than the 60 s after which a rank is lost
    assert {(outcome.error, outcome.culprits) for outcome in outcomes} == {("SettingsDiffer", (2,))}, outcomes
    assert {outcome.message for outcome in outcomes} == {
        f"ranks run other versions of moe_dist: rank 2 0.0.9+0badc0de, the rest {code_version()}; install the same on all: "
        "mixed_environments allows other GPUs, drivers and libraries, no other code of ours, which reads what ranks say"
    }
