"""Groups that grow and shrink: a joiner takes the running epoch while serving ranks do nothing at all; who is left goes on serving."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.meeting import MEET, PLAIN, MeetingBackend, MeetingConfig
from distributed.test_moe_ranks import tokens
from fakes import FakeOperation
from ranks import Rank, Ranks, run_ranks
from test_allreduce import Slowed, fastest, serve_right
from torch._C._distributed_c10d import TCPStore

import moe_dist as md
from moe_dist.allreduce import ONE_SHOT, ServedAllReduce
from moe_dist.backends.reference import compute
from moe_dist.checks import bind_weights
from moe_dist.distributed.group import RankGroup

POLICY = md.MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
LADDER = md.BucketLadder((1, 4))
CPU = torch.device("cpu")


def config(ep_size: int, *backends: md.BackendConfig) -> md.MoEConfig:
    """6 experts, which 2 and 3 ranks share evenly."""
    return md.MoEConfig(
        routing=md.RoutingConfig(6, 3),
        experts=md.ExpertConfig(hidden_size=32, intermediate_size=48),
        quant=md.QuantConfig(dtype="fp32"),
        parallel=md.ParallelConfig(ep_size=ep_size),
        backends=md.BackendOptions(backends) if backends else None,
        execution=md.ExecutionConfig(tune_max_num_tokens=4),
    )


def weights_of(chosen: md.MoEConfig, ep_rank: int) -> md.MoEWeightPack:
    return md.make_random_weights(md.MoEProblem.of(chosen, routed=True), ep_rank, 0, CPU, seed=7)


# -- joining -----------------------------------------------------------------------------------------------------------------


class Counting:
    """A rank's view of the rendezvous that counts its requests."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, 0

    def clone(self) -> Counting:
        return self

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._store, name)


def layer_of(rank: Rank, tuner: md.Tuner) -> tuple[md.MoELayer, Callable[[], Any]]:
    chosen = config(2)
    weights = weights_of(chosen, rank.index)
    tuner.record(md.MoEOperation(md.MoEProblem.of(chosen, routed=True), weights, CPU))
    layer = md.MoELayer(tuner=tuner, **chosen)
    return layer, lambda: [layer((tokens(chosen, count, seed=count), weights)).numpy().tobytes() for count in (1, 3, 4)]


def serves(rank: Rank) -> Any:
    """Tunes, serves while others join, then reloads. What it served in each state, and what it asked of the rendezvous while they joined."""
    operation = Slowed(rank, fastest(ONE_SHOT))
    counting: Any = Counting(TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False))
    group = RankGroup(counting, rank.index, rank.size, progress_timeout=timedelta(seconds=30))
    with md.Tuner(store=str(rank.folder / "store"), group=group, ladder=LADDER, policy=POLICY, deployment="d", device=CPU) as tuner:
        layer, serve = layer_of(rank, tuner)
        tuner.record(operation)
        tuner.run_pass()
        reduced = ServedAllReduce(operation, tuner)
        before, table = serve(), tuner.epoch
        asked = counting.asked
        assert asked > 0, "requests are counted"
        rank.mark(f"serving-{rank.index}")
        while not (rank.folder / "mark-joined").exists():  # in the middle of this the rank is stopped
            serve()
            time.sleep(0.01)
        right = serve_right(rank, reduced, 4)
        while_joining = counting.asked - asked
        kept = tuner.epoch is table and serve() == before
        reloaded = tuner.reload()
        tactics = [str(layer.lookup(count)) for count in (1, 4)]
        return before, while_joining, kept, right, table.digest, reloaded, tuner.epoch.number, tuner.epoch.digest, tactics


def joins_alone(rank: Rank, store: Path) -> Any:
    """One new process, a group of its own, with the share of rank 0."""
    with md.Tuner(store=str(store), ladder=LADDER, deployment="d", device=CPU) as tuner:
        layer, serve = layer_of(rank, tuner)
        return tuner.reload(), tuner.epoch.digest, serve(), [str(layer.lookup(count)) for count in (1, 4)]


def joins_as_replica(rank: Rank, store: Path) -> Any:
    """A replica of the same shape, with a rendezvous and symmetric memory of its own; in the end it tunes another problem."""
    operation = Slowed(rank)
    with md.Tuner(store=str(store), group=rank.group(), ladder=LADDER, policy=POLICY, deployment="d", device=CPU) as tuner:
        _, serve = layer_of(rank, tuner)
        tuner.record(operation)
        adopted, digest = tuner.reload(), tuner.epoch.digest
        reduced = ServedAllReduce(operation, tuner)
        served, right, tactic = serve(), serve_right(rank, reduced, 4), str(reduced.lookup(4))
        tuner.record(FakeOperation("another", {"plain": 30_000.0, "quick": 500.0}))
        report = tuner.run_pass()
        return adopted, digest, served, right, tactic, report.measured, report.epoch, report.digest


def test_joiners_take_the_running_epoch_while_serving_ranks_are_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "serving"
    with Ranks(serves, 2, folder) as ranks:
        for index in range(2):
            ranks.wait(f"serving-{index}")
        words = ranks._server.num_keys()
        for index in range(2):
            ranks.signal(index, signal.SIGSTOP)
        alone = run_ranks(joins_alone, 1, tmp_path / "alone", folder / "store")
        replica = run_ranks(joins_as_replica, 2, tmp_path / "replica", folder / "store", deadline=90.0)
        assert ranks._server.num_keys() == words, "a word was left for the serving ranks"
        for index in range(2):
            ranks.signal(index, signal.SIGCONT)
        (folder / "mark-joined").touch()
        serving = ranks.join(60.0)
    assert [outcome.error for outcome in (*alone, *replica, *serving)] == [""] * 5, (alone, replica, serving)
    before, asked, kept, right, digest, reloaded, number, newest, tactics = serving[0].value
    assert [outcome.value[1] for outcome in serving] == [0, 0], "a serving rank asked its rendezvous something"
    assert asked == 0
    assert [outcome.value[2:4] for outcome in serving] == [(True, True)] * 2, "a new epoch is adopted at `reload` alone"
    assert (kept, right) == (True, True)
    # The joiner serves what rank 0 does, to the bit.
    assert alone[0].value == (True, digest, before, tactics)
    for index, outcome in enumerate(replica):
        adopted, joined, served, right, tactic, measured, epoch, _ = outcome.value
        assert (adopted, joined, right, tactic) == (True, digest, True, str(ONE_SHOT))
        assert served == serving[index].value[0]
        assert (measured, epoch) == (4, 2), "what it joined with is not measured again"
    assert (reloaded, number, newest) == (True, 2, replica[0].value[7])


# -- shrinking ---------------------------------------------------------------------------------------------------------------


def meeting_layer(rank: Rank, scope: str, names: tuple[int, ...]) -> tuple[MeetingBackend, md.MoEConfig, md.MoEWeightPack, md.MoEOperation]:
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    backend = MeetingBackend(client, f"meet-{scope}", names.index(rank.index), names, patience_s=3.0)
    chosen = config(len(names), MeetingConfig())
    weights = weights_of(chosen, names.index(rank.index))
    return backend, chosen, weights, md.MoEOperation(md.MoEProblem.of(chosen, routed=True), weights, CPU, chosen.options, [backend])


def shrinks(rank: Rank, ending: str) -> Any:
    """Rank 2 goes; what the others serve before and after, and with the group that they start then."""
    backend, chosen, weights, operation = meeting_layer(rank, "before", (0, 1, 2))
    acts = tokens(chosen, 3, seed=rank.index)
    truth = compute(bind_weights(operation.moe_problem, weights), acts)
    result: dict[str, Any] = {}
    with md.Tuner(store=str(rank.folder / "store"), group=rank.group(progress_timeout=30.0), ladder=LADDER, policy=POLICY,
                  deployment="ep3", device=CPU) as tuner:  # fmt: skip
        tuner.record(operation)
        tuner.run_pass()
        layer = md.MoELayer(tuner=tuner, extra_backends=[backend], **chosen)
        layer((acts, weights), group_tokens=3)
        result["before"] = backend.executed[-1][0]
        if rank.index == 2:
            if ending == "killed":
                rank.mark("served")
                time.sleep(3600)
            return result
        if ending == "killed":
            rank.wait("killed")
        with pytest.raises(md.RankLost, match="rank 2 lost in meeting") as lost:
            layer((acts, weights), group_tokens=3)
        result["culprits"] = lost.value.ranks
        calls = len(backend.executed)
        out = layer((acts, weights), group_tokens=3)
        result["after"] = [tactic for tactic, _ in backend.executed[calls:]]
        result["right"] = torch.allclose(out, truth, rtol=1e-4, atol=1e-4)
        for refused in (tuner.run_pass, tuner.reload):
            with pytest.raises(md.TunerStateError, match=r"this group is dead \(rank 2 lost in meeting \d+\); start a new group"):
                refused()
        result["epoch"] = tuner.epoch.number

    backend, chosen, weights, operation = meeting_layer(rank, "after", (0, 1))
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    group = RankGroup(client, rank.index, 2, scope="after", progress_timeout=timedelta(seconds=30))
    with md.Tuner(store=str(rank.folder / "store"), group=group, ladder=LADDER, policy=POLICY, deployment="ep2", device=CPU) as tuner:
        tuner.record(operation)
        report = tuner.run_pass()
        result["new pass"] = (report.hits, report.measured, report.digest)
        layer = md.MoELayer(tuner=tuner, extra_backends=[backend], **chosen)
        layer((acts, weights), group_tokens=3)
        result["new group"] = backend.executed[-1][0]
    return result


@pytest.mark.parametrize("ending", ["in order", "killed"])
def test_a_group_that_shrinks_serves_on_without_collectives_and_a_smaller_one_starts(ending: str, tmp_path: Path) -> None:
    with Ranks(shrinks, 3, tmp_path, ending) as ranks:
        if ending == "killed":
            ranks.wait("served")
            ranks.kill(2)
            (tmp_path / "mark-killed").touch()
        outcomes = [ranks.join_one(rank, 90.0) for rank in range(3)]
    assert [outcome.error for outcome in outcomes] == ["", "", "killed" if ending == "killed" else ""], outcomes
    assert all(outcome.value["before"] == MEET for outcome in outcomes if outcome.value)
    first, second = outcomes[0].value, outcomes[1].value
    assert first == second
    assert (first["culprits"], first["after"], first["right"], first["epoch"]) == ((2,), [PLAIN], True, 1)
    hits, measured, _ = first["new pass"]
    assert (hits, measured) == (0, 4), "another EP size is another problem: 2 tactics in 2 buckets"
    assert first["new group"] == MEET


def leaves_in_order(rank: Rank) -> Any:
    """Rank 2 says that it leaves; its peers would wait for it for a minute."""
    operation = Slowed(rank, fastest(ONE_SHOT), patience_s=60.0)
    with md.Tuner(store=str(rank.folder / "store"), group=rank.group(progress_timeout=30.0), ladder=LADDER, policy=POLICY,
                  deployment="d", device=CPU) as tuner:  # fmt: skip
        tuner.record(operation)
        tuner.run_pass()
        reduced = ServedAllReduce(operation, tuner)
        right = serve_right(rank, reduced, 4)
        if rank.index == 2:
            tuner.withdraw("scaled down")
            return right
        started = time.monotonic()
        with pytest.raises(md.RankLost) as lost:
            serve_right(rank, reduced, 4)
        return right, lost.value.ranks, time.monotonic() - started < 30, tuner.group.dead


def test_a_rank_that_leaves_in_order_keeps_nobody_waiting(tmp_path: Path) -> None:
    outcomes = run_ranks(leaves_in_order, 3, tmp_path, deadline=90.0)
    assert [outcome.error for outcome in outcomes] == [""] * 3, outcomes
    assert outcomes[2].value is True
    said = {"rank 2 lost in one_shot of [4, 7] float32: said rank 2", "rank 2 lost in one_shot of [4, 7] float32: said rank 0",
            "rank 2 lost in one_shot of [4, 7] float32: said rank 1"}  # fmt: skip
    for outcome in outcomes[:2]:
        assert outcome.value[:3] == (True, (2,), True)
        assert outcome.value[3] in said
