"""Groups as deployments have them: EP over DP x TP, pipeline stages, replicas, uneven batches; nobody waits for another group.

The framework of these tests has process groups whose collectives raise: tuning may use a group's ranks and its rendezvous alone.
"""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.meeting import MEET, PLAIN, MeetingBackend, MeetingConfig
from distributed.test_elastic import CPU, LADDER, POLICY, config, weights_of
from distributed.test_moe_ranks import tokens
from fakes import FakeOperation, FakeProbe
from ranks import Rank, Ranks, run_ranks
from torch._C._distributed_c10d import TCPStore

import moe_dist as md
from moe_dist.backends.reference import compute
from moe_dist.checks import bind_weights
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.layout import Layout
from moe_dist.tuning.policy import STRATEGIES
from moe_dist.tuning.problem import ProbeSpec

COSTS: dict[str, float | str] = {"plain": 30_000.0, "quick": 1000.0}
# No rank of these tests is to be lost while it, or the test, waits for a core; the tests' own deadlines are shorter.
PATIENCE_S = 150.0
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Untouchable(dist.ProcessGroup):
    """A framework's group: whatever is asked of its ranks raises."""

    def getBackendName(self) -> str:
        return "untouchable"

    def _refuse(self, *args: Any, **named: Any) -> Any:
        raise AssertionError("the framework's group was touched")


COLLECTIVES = ("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "barrier", "monitored_barrier")
for name in dir(dist.ProcessGroup):
    if not name.startswith("__") and name.lstrip("_").startswith(COLLECTIVES):
        setattr(Untouchable, name, Untouchable._refuse)
dist.Backend.register_backend("untouchable", lambda store, rank, size, timeout: Untouchable(rank, size), devices=["cpu"])


def untouchable_world(rank: Rank) -> None:
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("untouchable", store=store, rank=rank.index, world_size=rank.size)


def touches_it(rank: Rank) -> None:
    untouchable_world(rank)
    dist.all_reduce(torch.ones(1))


def test_a_framework_s_group_that_is_touched_is_noticed(tmp_path: Path) -> None:
    outcomes = run_ranks(touches_it, 1, tmp_path)
    assert (outcomes[0].error, outcomes[0].message) == ("AssertionError", "the framework's group was touched")


class Announcing(FakeOperation):
    """Tells the test when this rank's stage or replica measures, and stays there until the test has `let` it go on."""

    rank: Rank
    where: str = ""

    def probe(self, num_tokens: int, spec: ProbeSpec) -> FakeProbe:
        self.rank.mark(f"measuring-{self.where}-{self.rank.index}")
        self.rank.wait(f"let-{self.where}", PATIENCE_S)
        return super().probe(num_tokens, spec)


def let(folder: Path, where: str) -> None:
    (folder / f"mark-let-{where}").touch()


def operations(rank: Rank, where: str, names: list[str]) -> list[FakeOperation]:
    made = []
    for name in names:
        operation = Announcing(f"{where} {name}", COSTS)
        operation.rank, operation.where = rank, where
        made.append(operation)
    return made


# -- a framework's own layout ------------------------------------------------------------------------------------------------

DP, PP, TP = 2, 2, 2
# Global rank = (dp * PP + pp) * TP + tp, as vLLM counts: a stage's EP group spans DP x TP, and its ranks are no neighbours.
EP_GROUPS = {stage: [(dp * PP + stage) * TP + tp for dp in range(DP) for tp in range(TP)] for stage in range(PP)}


def runs_in_a_framework(rank: Rank, strategy: str) -> Any:
    """The second DP rank of stage 0 had no batch at all, that of stage 1 one for half of the layers: (table, names, measured, digest)."""
    untouchable_world(rank)
    groups = {stage: dist.new_group(ranks, backend="untouchable", use_local_synchronization=True) for stage, ranks in EP_GROUPS.items() if rank.index in ranks}  # fmt: skip
    ((stage, group),) = groups.items()
    seen = ["a", "b"] if rank.index < PP * TP else [] if stage == 0 else ["b"]
    with md.Tuner(store=str(rank.folder / "store"), group=group, strategy=strategy, ladder=LADDER, policy=POLICY, device=CPU,
                  deployment=f"d/stage-{stage}", progress_timeout=timedelta(seconds=PATIENCE_S)) as tuner:  # fmt: skip
        if stage == 1:
            rank.mark(f"begins-{rank.index}")
        for operation in operations(rank, f"stage {stage}", seen):
            tuner.record(operation)
        report = tuner.run_pass()
        served = {str(row.cell.problem.fields[0][1]): str(row.winner.tactic["name"]) if row.winner else "untuned" for row in report.rows}
        return served, tuner.group.names, report.measured, report.digest


@each_strategy
def test_ep_over_dp_and_tp_tunes_in_stages_that_do_not_wait_for_each_other(strategy: str, tmp_path: Path) -> None:
    with Ranks(runs_in_a_framework, DP * PP * TP, tmp_path, strategy) as ranks:
        for index in EP_GROUPS[1]:
            ranks.wait(f"begins-{index}")
        ranks.wait(f"measuring-stage 1-{EP_GROUPS[1][0]}")
        for index in EP_GROUPS[1]:  # a whole stage stands still in its pass
            ranks.signal(index, signal.SIGSTOP)
        for stage in EP_GROUPS:
            let(tmp_path, f"stage {stage}")
        first = [ranks.join_one(index, 60.0) for index in EP_GROUPS[0]]
        stopped = [not (tmp_path / f"outcome-{index}").exists() for index in EP_GROUPS[1]]
        for index in EP_GROUPS[1]:
            ranks.signal(index, signal.SIGCONT)
        second = [ranks.join_one(index, 60.0) for index in EP_GROUPS[1]]
    assert all(stopped), "stage 1 ended before stage 0 could be seen to not wait for it"
    for stage, outcomes in enumerate((first, second)):
        assert [outcome.error for outcome in outcomes] == [""] * (DP * TP), outcomes
        tables, names, measured, digests = zip(*(outcome.value for outcome in outcomes), strict=True)
        assert set(digests) == {digests[0]}
        served = {f"stage {stage} a": "quick", f"stage {stage} b": "quick"}
        assert list(tables) == [served] * (DP * TP), "ranks without a batch take part and abstain"
        assert [list(of) for of in names] == [EP_GROUPS[stage]] * (DP * TP)
        alone = [8, 8, 0, 0] if stage == 0 else [8, 8, 4, 4]  # under reload a rank counts what it ran itself
        assert list(measured) == (alone if strategy == "reload" else [8] * (DP * TP))


# -- numbers -----------------------------------------------------------------------------------------------------------------

LAYOUT = Layout(tp=2, ep=1, pp=1, dp=3)


def runs_by_numbers(rank: Rank, strategy: str) -> Any:
    """Three replicas of two ranks: 0 tunes, 1 is stopped while it tunes, 2 comes later. (hits, measured, calls, digest)."""
    place = LAYOUT.place(rank.index)
    if place.replica == 2:
        rank.wait("published")
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    group = RankGroup(
        client, place.group.index(rank.index), len(place.group), names=place.group, scope=f"replica-{place.replica}",
        progress_timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    with md.Tuner(store=str(rank.folder / "store"), group=group, strategy=strategy, ladder=LADDER, policy=POLICY, device=CPU,
                  deployment="d") as tuner:  # fmt: skip
        (operation,) = operations(rank, f"replica {place.replica}", [""])
        operation.problem = FakeOperation("a", COSTS).problem  # replicas run the same model
        tuner.record(operation)
        report = tuner.run_pass()
        return report.hits, report.measured, len(operation.calls), report.digest


@each_strategy
def test_a_replica_reuses_what_another_published_and_waits_for_none(strategy: str, tmp_path: Path) -> None:
    with Ranks(runs_by_numbers, LAYOUT.world_size, tmp_path, strategy) as ranks:
        for index in (0, 2):  # both have found nothing in the store, and one is stopped there, before anybody publishes
            ranks.wait(f"measuring-replica {index // 2}-{index}")
        ranks.signal(2, signal.SIGSTOP)
        for replica in range(LAYOUT.dp):
            let(tmp_path, f"replica {replica}")
        first = [ranks.join_one(index, 60.0) for index in (0, 1)]
        (tmp_path / "mark-published").touch()
        third = [ranks.join_one(index, 60.0) for index in (4, 5)]
        assert not (tmp_path / "outcome-2").exists(), "replica 1 ended too early to show anything"
        ranks.signal(2, signal.SIGCONT)
        second = [ranks.join_one(index, 60.0) for index in (2, 3)]
    for outcomes in (first, second, third):
        assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert [outcome.value[:2] for outcome in (*first, *second)] == [(0, 4)] * 4
    assert [outcome.value[:3] for outcome in third] == [(2, 0, 0)] * 2, "a replica of what is known measures nothing"
    assert len({outcome.value[3] for outcome in (*first, *second, *third)}) == 1


# -- uneven batches ----------------------------------------------------------------------------------------------------------

BATCHES = ((4, 0, 1), (0, 3, 1), (2, 2, 0))  # tokens of each call by rank: no two alike, each rank without any once
PADDED = [max(batch[call] for batch in BATCHES) for call in range(3)]


def serves_uneven_batches(rank: Rank) -> Any:
    """(what ran with group_tokens, what without, all right)."""
    untouchable_world(rank)
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    backend = MeetingBackend(client, "meet", rank.index, range(3))
    chosen = config(3, MeetingConfig())
    weights = weights_of(chosen, rank.index)
    operation = md.MoEOperation(md.MoEProblem.of(chosen, routed=True), weights, CPU, chosen.options, [backend])
    with md.Tuner(store=str(rank.folder / "store"), group=dist.group.WORLD, ladder=LADDER, policy=POLICY, deployment="d", device=CPU,
                  progress_timeout=timedelta(seconds=30)) as tuner:  # fmt: skip
        tuner.record(operation)
        tuner.run_pass()
    layer = md.MoELayer(tuner=tuner, extra_backends=[backend], **chosen)
    ran, right = [], []
    for group_tokens in (PADDED, [None] * 3):
        backend.executed.clear()
        for call, count in enumerate(BATCHES[rank.index]):
            acts = tokens(chosen, count, seed=10 * rank.index + call)
            out = layer((acts, weights), group_tokens=group_tokens[call])
            right.append(torch.allclose(out, compute(bind_weights(operation.moe_problem, weights), acts), rtol=1e-4, atol=1e-4))
        ran.append(list(backend.executed))
    return (*ran, right)


def test_a_token_count_that_all_know_lets_uneven_ranks_meet(tmp_path: Path) -> None:
    outcomes = run_ranks(serves_uneven_batches, 3, tmp_path, deadline=90.0)
    assert [outcome.error for outcome in outcomes] == [""] * 3, outcomes
    for batch, outcome in zip(BATCHES, outcomes, strict=True):
        together, apart, right = outcome.value
        assert together == [(MEET, count) for count in batch], "a rank without tokens meets its peers, too"
        assert apart == [(PLAIN, count) for count in batch if count], "no other rank's count is known: nobody may wait"
        assert right == [True] * 6
