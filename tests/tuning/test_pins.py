"""Pins: an epoch that a captured graph was made with stays, on all ranks, until the graph is gone; then the next one is taken."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.passes import make_tuner
from fakes import FakeOperation
from ranks import Rank, Ranks

import moe_dist as md
from moe_dist.backends.base import MoEProblem, Runner
from moe_dist.distributed import epoch as epochs
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, reserve
from moe_dist.errors import PassAborted, TunerStateError
from moe_dist.stores.codec import encode_epoch
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning import pins
from moe_dist.tuning.pins import Flag, Pins
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, Cell, Epoch, Tactic, Winner
from moe_dist.tuning.tuner import Tuner

COSTS = {"plain": 30_000.0, "quick": 500.0}
POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
HELD = "hold the epoch that is served; delete or release them, try again, and capture anew after that"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(pins, "_GRACE_S", 0.05)


def tune(store: Any, name: str) -> str:
    """Another process's pass: the deployment's next epoch. Its digest."""
    with Tuner(store=store, deployment="test", policy=POLICY, ladder=BucketLadder((1,)), device="cpu") as other:
        other.reload()
        other.record(FakeOperation(name, COSTS))
        return other.run_pass().digest


@pytest.fixture
def behind() -> Iterator[tuple[Tuner, str, str]]:
    """A tuner that serves the first epoch of its store, where there is a second by now; the digests of both."""
    store = MemoryStore()
    first = tune(store, "a")
    with Tuner(store=store, deployment="test", policy=POLICY, ladder=BucketLadder((1,)), device="cpu") as tuner:
        assert tuner.reload()
        yield tuner, first, tune(store, "b")


def test_an_epoch_is_not_replaced_while_a_pin_lives(behind: tuple[Tuner, str, str], caplog: pytest.LogCaptureFixture) -> None:
    tuner, first, second = behind
    tuner.record(FakeOperation("c", COSTS))
    with tuner.pin(), caplog.at_level(logging.WARNING):
        assert not tuner.reload()
        assert f"the committed epoch is not adopted: rank 0: pins (1) {HELD}" in caplog.text
        with pytest.raises(PassAborted, match=re.escape(f"rank 0: pins (1) {HELD}")) as caught:
            tuner.run_pass()
        assert caught.value.ranks == (0,)
        assert tuner.epoch.digest == first
    assert tuner.reload()
    assert tuner.epoch.digest == second
    with tuner.pin():
        assert tuner.reload(), "the epoch that is pinned may be adopted again"
    assert tuner.run_pass().measured == 2


def test_amid_a_capture_no_epoch_is_tuned_or_adopted(behind: tuple[Tuner, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, first, second = behind
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for call in (tuner.reload, tuner.run_pass):
            with pytest.raises(TunerStateError, match="under CUDA graph capture; tune before capturing"):
                call()
    assert tuner.epoch.digest == first
    assert tuner.reload(), "nothing of it is left"
    assert tuner.epoch.digest == second


def pinned_on_rank_1(rank: Rank) -> Any:
    """(reloaded, error of the pass, its culprits, epoch kept; then, without the pin: reloaded, a pass)."""
    pins._GRACE_S = 0.05
    with make_tuner(rank, "reduce", progress_timeout=30.0) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        served = tuner.epoch
        rank.mark(f"tuned-{rank.index}")
        rank.wait("published")
        pin = tuner.pin() if rank.index == 1 else None
        reloaded = tuner.reload()
        error = PassAborted("none")
        try:
            tuner.run_pass()
        except PassAborted as caught:
            error = caught
        kept = tuner.epoch is served
        if pin is not None:
            pin.release()
        return reloaded, str(error), error.ranks, kept, tuner.reload(), tuner.run_pass().digest


def test_a_pin_on_one_rank_keeps_the_epoch_of_all(tmp_path: Path) -> None:

    with Ranks(pinned_on_rank_1, 2, tmp_path) as ranks:
        for rank in range(2):
            ranks.wait(f"tuned-{rank}")
        tune(str(tmp_path / "store"), "b")
        (tmp_path / "mark-published").touch()
        outcomes = ranks.join(60.0)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert outcomes[0].value == outcomes[1].value
    assert outcomes[0].value[:5] == (False, f"rank 1: pins (1) {HELD}", (1,), True, True)


# -- graphs ------------------------------------------------------------------------------------------------------------------


def raise_flag(flag: Flag) -> None:
    """As the driver does: its own thread calls the function with the address."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(flag.raise_function.value or 0)
    thread = threading.Thread(target=function, args=(flag.address,))
    thread.start()
    thread.join()


class Thing:
    """What a graph reads."""


def test_a_graph_has_one_pin_and_keeps_what_it_reads_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[Flag] = []
    capturing = 7

    def flag_at_the_end(graph: ctypes.c_void_p) -> Flag:
        flags.append(Flag())
        return flags[-1]

    monkeypatch.setattr(pins, "_captured_graph", lambda device: (capturing, ctypes.c_void_p()))
    monkeypatch.setattr(pins, "_flag_at_the_end_of", flag_at_the_end)
    held, things = Pins(), [Thing(), Thing(), Thing()]
    alive = [weakref.ref(thing) for thing in things]
    cuda = torch.device("cuda")
    held.add_captured(cuda, things[0])
    held.add_captured(cuda, things[1], things[0])  # another layer in the same graph
    capturing = 8
    held.add_captured(cuda, things[2])
    things.clear()
    assert len(flags) == 2
    assert held.why_not_replace() == f"captured graphs (2) {HELD}"
    raise_flag(flags[0])
    assert held.why_not_replace() == f"captured graphs (1) {HELD}"
    assert [thing() is not None for thing in alive] == [False, False, True]
    raise_flag(flags[1])
    assert held.why_not_replace() is None
    assert alive[2]() is None


def test_a_driver_that_cannot_tell_keeps_the_epoch_for_good(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(device: torch.device) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(pins, "_captured_graph", missing)
    held = Pins()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            held.add_captured(torch.device("cuda"), Thing())
    assert held.why_not_replace() == f"captured graphs (1) {HELD}"
    assert [record.getMessage() for record in caplog.records] == [
        "the driver can't tell when a captured graph ends (libcuda.so.1: cannot open shared object file): "
        "it is taken to live as long as its tuner"
    ]


# -- graphs on a GPU ---------------------------------------------------------------------------------------------------------


class TableConfig(md.BackendConfig):
    name = "table"


class TableBackend(md.Backend):
    """Its output is a constant that the device reads from memory that only the bound runner holds."""

    name = "table"
    config_type = TableConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
        return None

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: md.BackendConfig) -> Sequence[Tactic]:
        return [Tactic.of("table", value=value) for value in (0.0, 1.0, 2.0)]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        return Tactic.of("table", value=0.0)

    def bind(self, layer: md.BoundLayer, tactic: Tactic) -> Runner:
        table = torch.full((1 << 20,), float(tactic["value"] or 0), device=layer.weights.w13.device)

        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> Tactic:
            out.copy_(table[: out.numel()].view_as(out))
            return tactic

        return run


CONFIG = md.MoEConfig(
    routing=md.RoutingConfig(16, 4),
    experts=md.ExpertConfig(hidden_size=256, intermediate_size=128),
    backends=md.BackendOptions((TableConfig(),)),
    execution=md.ExecutionConfig(tune_max_num_tokens=8),
)


def publish(store: MemoryStore, number: int, value: float) -> None:
    """Epoch `number`: tactic `value` serves CONFIG's problem at up to 8 tokens, in graphs and eagerly."""
    problem = MoEProblem.of(CONFIG, routed=True).key()
    winner = Winner(Tactic.of("table", value=value), 1.0, Tactic.of("table", value=0.0), 2.0, "tuned")
    table = Epoch(number, "test", {Cell(problem, mode, Bucket(1, 8)): winner for mode in ("eager", "cuda_graph")})
    epochs.publish(store, table, encode_epoch(table, {}))


def batch(device: torch.device) -> tuple[md.MoEActivationPack, md.MoEWeightPack]:
    weights = md.make_random_weights(MoEProblem.of(CONFIG, routed=True), 0, 0, device)
    acts = md.MoEActivationPack(
        hidden_states=torch.zeros(8, 256, dtype=torch.bfloat16, device=device),
        topk_ids=torch.arange(4, dtype=torch.int32, device=device).repeat(8, 1),
        topk_weights=torch.full((8, 4), 0.25, device=device),
    )
    return acts, weights


@pytest.mark.gpu
def test_a_captured_call_replays_its_epoch_until_its_graph_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    device, store = torch.device("cuda", torch.cuda.current_device()), MemoryStore()
    acts, weights = batch(device)
    publish(store, 1, 1.0)
    tuner = Tuner(store=store, deployment="test", policy=POLICY, ladder=BucketLadder((8,)), device=device)
    assert tuner.reload()
    arena = reserve(RankGroup.alone(), "test", 1024)
    assert isinstance(arena, Arena)
    tuner.arena, arena_lives = arena, weakref.ref(arena)
    layer = md.MoELayer(tuner=tuner, extra_backends=[TableBackend()], **CONFIG)
    layer((acts, weights), mode="cuda_graph")
    assert tuner.pins.why_not_replace() is None, "only what is captured pins"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer((acts, weights), mode="cuda_graph")
        layer((acts, weights), mode="cuda_graph")

    publish(store, 2, 2.0)
    tuner.record(FakeOperation("a", COSTS))
    with caplog.at_level(logging.WARNING):
        assert not tuner.reload()
    assert f"captured graphs (1) {HELD}" in caplog.text
    with pytest.raises(PassAborted, match=r"captured graphs \(1\) hold the epoch"):
        tuner.run_pass()
    assert layer.lookup(8, "cuda_graph") == Tactic.of("table", value=1.0)

    # Nobody but the pin holds what the graph reads: whoever allocates next would get it.
    layer((acts, md.make_random_weights(MoEProblem.of(CONFIG, routed=True), 0, 0, device, seed=1)))
    del layer, arena
    tuner.arena = None
    gc.collect()
    others = [torch.full((1 << 20,), 3.0, device=device) for _ in range(16)]
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert out.unique().tolist() == [1.0]
    assert len(others) == 16
    assert arena_lives() is not None, "the arena is the graph's as long as it lives"

    del graph, out
    assert tuner.reload()
    assert arena_lives() is None
    layer = md.MoELayer(tuner=tuner, extra_backends=[TableBackend()], **CONFIG)
    assert layer((acts, weights)).unique().tolist() == [2.0]
    assert tuner.run_pass().measured == 2
    tuner.close()


@pytest.mark.gpu
def test_graphs_of_one_tuner_are_told_apart_and_a_failed_capture_holds_nothing() -> None:
    device, store = torch.device("cuda", torch.cuda.current_device()), MemoryStore()
    acts, weights = batch(device)
    publish(store, 1, 1.0)
    tuner = Tuner(store=store, deployment="test", policy=POLICY, ladder=BucketLadder((8,)), device=device)
    assert tuner.reload()
    layer = md.MoELayer(tuner=tuner, extra_backends=[TableBackend()], **CONFIG)
    layer((acts, weights))
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            layer((acts, weights), mode="cuda_graph")
    assert tuner.pins.why_not_replace() == f"captured graphs (2) {HELD}"
    graphs.pop().reset()
    del graph
    assert tuner.pins.why_not_replace() == f"captured graphs (1) {HELD}"
    graphs.clear()

    def capture_and_wait() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            layer((acts, weights), mode="cuda_graph")
            acts.hidden_states.sum().item()  # waits, which a capture forbids

    with pytest.raises(RuntimeError):
        capture_and_wait()
    assert tuner.pins.why_not_replace() is None
    tuner.close()
