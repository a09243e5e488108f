"""What a window of time contains, in which order candidates are visited, and what puts one out: on a simulated device and on fakes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeOperation, FakeProbe, tactic

import moe_dist as md
from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.torch_loop import TorchLoopBackend
from moe_dist.tuning import measure
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import MAX_CALLS, UNSTABLE_RATIO, CellMeasurer, EagerClock, EventClock, GraphClock, journal_key
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, Cell, Failed, ProbeSpec, Tactic, Timed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
POLICY = MeasurementPolicy(rounds=1, sweeps=3, window=timedelta(milliseconds=1))


def cell_of(operation: Any, high: int = 1) -> Cell:
    return Cell(operation.problem, "eager", Bucket(1, high))


def measurer(
    operation: Any, *, policy: MeasurementPolicy = POLICY, progress: Callable[[], None] = lambda: None, high: int = 1
) -> CellMeasurer:
    return CellMeasurer(operation, cell_of(operation, high), policy, ProbeSpec(copies=2), progress=progress)


# -- what a window contains: a device and a host clock in simulated time ------------------------------------------------


class Machine:
    """One stream: a launch takes host time, its work starts when host and stream are there. Stands in for torch.cuda and time."""

    def __init__(self) -> None:
        self.host_us, self.device_us = 0.0, 0.0

    def launch(self, host_us: float, device_us: float) -> None:
        self.host_us += host_us
        self.device_us = max(self.device_us, self.host_us) + device_us

    def synchronize(self, device: Any = None) -> None:
        self.host_us = max(self.host_us, self.device_us)

    def perf_counter_ns(self) -> int:
        return round(self.host_us * 1e3)

    def event(self) -> Any:
        machine = self

        class Event:
            at_us = 0.0

            def record(self) -> None:
                self.at_us = max(machine.device_us, machine.host_us)

            def synchronize(self) -> None:
                machine.synchronize()

            def elapsed_time(self, end: Any) -> float:
                return float(end.at_us - self.at_us) / 1e3

        return Event()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(measure, "_synchronize", machine.synchronize)
    monkeypatch.setattr(measure, "_event", machine.event)
    monkeypatch.setattr(measure.time, "perf_counter_ns", machine.perf_counter_ns)
    return machine


def launches(machine: Machine, host_us: float, device_us: float) -> Callable[[int], Tactic]:
    def run(index: int) -> Tactic:
        machine.launch(host_us, device_us)
        return tactic("x")

    return run


def test_eager_counts_host_time_and_takes_the_tactic_with_less_of_it(machine: Machine) -> None:
    """X costs 50 us of host and 5 of device, Y 5 and 8. Back to back, X is host-bound at 50 us a call and Y device-bound at 8."""
    x = EagerClock(launches(machine, 50.0, 5.0), 2, CUDA).window(100)
    y = EagerClock(launches(machine, 5.0, 8.0), 2, CUDA).window(100)
    assert x == pytest.approx(50.0, abs=0.5)
    assert y == pytest.approx(8.0, abs=0.5)


def test_events_count_device_time_alone_where_the_device_is_the_bottleneck(machine: Machine) -> None:
    assert EventClock(launches(machine, 1.0, 8.0), 2, CUDA).window(100) == pytest.approx(8.0, abs=0.5)


def test_work_left_from_preparation_is_not_in_the_window(machine: Machine) -> None:
    clock = EagerClock(launches(machine, 5.0, 8.0), 2, CUDA)
    machine.launch(0.0, 1e6)
    assert clock.window(100) == pytest.approx(8.0, abs=0.5)


def test_the_inputs_of_a_window_rotate() -> None:
    seen: list[int] = []
    clock = EagerClock(lambda index: seen.append(index) or tactic("x"), 3, CPU)  # type: ignore[func-returns-value]
    clock.window(7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


# -- in which order -----------------------------------------------------------------------------------------------------


class Scripted:
    """Stands in for a prepared candidate's clock: windows take what `script` says, the last value again and again."""

    visits: list[str]

    def __init__(self, name: str, script: Sequence[float | Exception], visits: list[str]) -> None:
        self.name, self.script, self.visits, self.calls = name, list(script), visits, 0

    def window(self, calls: int) -> float:
        self.visits.append(self.name)
        self.calls = calls
        value = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(value, Exception):
            raise value
        return value


def scripted(scripts: dict[str, Sequence[float | Exception]]) -> tuple[CellMeasurer, list[str], list[Tactic]]:
    operation, visits = FakeOperation("a", dict.fromkeys(scripts, 0.0)), list[str]()
    opened = measurer(operation)
    tactics = [tactic(name) for name in scripts]
    opened.prepare(tactics)
    opened._clocks = {tactic(name): Scripted(name, script, visits) for name, script in scripts.items()}
    return opened, visits, tactics


def test_candidates_are_visited_in_interleaved_sweeps_that_start_at_another_one_each_time() -> None:
    opened, visits, tactics = scripted({"a": [10.0], "b": [20.0], "c": [30.0]})
    measured = opened.round(tactics)
    assert "".join(visits) == "abc" + "bca" + "cab"
    assert measured[tactics[1]] == Timed(20.0, 0.0, 3)


def test_a_round_on_an_unstable_machine_is_repeated_once() -> None:
    slow = 10.0 * UNSTABLE_RATIO + 0.1
    opened, visits, tactics = scripted({"a": [10.0, 10.0, slow, 10.0], "b": [99.0, 99.0, 99.0, 20.0]})
    measured = opened.round(tactics)
    assert len(visits) == 2 * 3 * 2
    assert measured == {tactics[0]: Timed(10.0, 0.0, 3), tactics[1]: Timed(20.0, 0.0, 3)}, "the first attempt is not kept"


def test_a_round_that_stays_unstable_is_taken_after_the_second_attempt() -> None:
    opened, visits, tactics = scripted({"a": [10.0, 20.0, 40.0, 10.0, 20.0, 40.0]})
    assert opened.round(tactics) == {tactics[0]: Timed(20.0, 15.0, 3)}
    assert len(visits) == 6


def test_a_stable_round_is_not_repeated() -> None:
    opened, visits, tactics = scripted({"a": [10.0, 10.5, 10.9], "b": [1.0, 100.0, 10_000.0]})
    opened.round(tactics)
    assert len(visits) == 2 * 3, "stability is judged by the first candidate, the default, alone"


def test_a_window_has_calls_enough_to_fill_it_and_no_more_than_the_limit() -> None:
    opened, _, tactics = scripted({"a": [10.0], "b": [20.0], "c": [30.0]})
    opened._call_us = dict(zip(tactics, (100.0, 5000.0, 0.01), strict=True))  # a window is 1 ms
    opened.round(tactics)
    assert [clock.calls for clock in opened._clocks.values() if isinstance(clock, Scripted)] == [10, 1, MAX_CALLS]


def test_progress_moves_with_every_candidate() -> None:
    moved: list[None] = []
    opened = measurer(FakeOperation("a", {"a": 0.0, "b": 0.0, "c": 0.0}), progress=lambda: moved.append(None))
    opened.prepare([tactic(name) for name in "abc"])
    assert len(moved) == 3
    opened.round([tactic("a"), tactic("b")], sweeps=1)
    assert len(moved) >= 5


# -- what puts a candidate out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        ("oom", "out of memory in preparation: no room for the tactic"),
        ("raise", "ValueError: this tactic can't be compiled"),
    ],
)
def test_a_candidate_that_fails_in_preparation_is_a_cell_and_the_rest_is_timed(cost: str, reason: str) -> None:
    opened = measurer(FakeOperation("a", {"plain": 10.0, "bad": cost}))
    opened.prepare([tactic("plain"), tactic("bad")])
    measured = opened.round([tactic("plain"), tactic("bad")])
    assert measured[tactic("bad")] == Failed(reason)
    assert isinstance(measured[tactic("plain")], Timed)


def test_out_of_memory_for_the_probe_fails_every_candidate() -> None:
    operation = FakeOperation("a", {"plain": 10.0, "b": 10.0}, probe_fault="oom")
    opened = measurer(operation)
    opened.prepare([tactic("plain"), tactic("b")])
    assert set(opened.round([tactic("plain"), tactic("b")]).values()) == {Failed("out of memory in preparation: no room for the probe")}


def test_torch_out_of_memory_is_a_cell_too(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = FakeOperation("a", {"plain": 10.0})

    def probe(num_tokens: int, spec: ProbeSpec) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")

    monkeypatch.setattr(operation, "probe", probe)
    opened = measurer(operation)
    opened.prepare([tactic("plain")])
    assert opened.round([tactic("plain")]) == {
        tactic("plain"): Failed("out of memory in preparation: CUDA out of memory. Tried to allocate 2 GiB")
    }


@pytest.mark.parametrize("part", ["probe", "bind"])
def test_host_memory_that_torch_can_not_allocate_is_a_cell_too(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a petabyte, which no machine has: torch tells it by a plain RuntimeError."""
    operation = FakeOperation("a", {"plain": 10.0})
    owner = operation if part == "probe" else FakeProbe

    def allocate(*arguments: Any) -> Any:
        return torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr(owner, part, allocate)
    opened = measurer(operation)
    opened.prepare([tactic("plain")])
    (failed,) = opened.round([tactic("plain")]).values()
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("out of memory in preparation: ")
    assert "can't allocate memory: you tried to allocate 1125899906842624 bytes" in failed.reason
    assert opened.bind(tactic("plain")) == failed.reason


def test_a_candidate_is_journaled_whenever_it_runs(tmp_path: Path) -> None:
    """In preparation, in a window, and in the counted runs of a collective one: a process that dies there, dies of it."""
    operation = FakeOperation("a", {"plain": 10.0, "all-b": 10.0})
    journal = Journal(tmp_path, "e1")
    marked: list[set[str]] = []

    class Watched(FakeProbe):
        def bind(self, wanted: Tactic) -> Callable[[int], Tactic]:
            inner = super().bind(wanted)

            def run(index: int) -> Tactic:
                marked.append({json.loads(path.read_text())["tactic_key"] for path in journal.folder.iterdir()})
                return inner(index)

            return run

    operation.probe = lambda num_tokens, spec: Watched(operation)  # type: ignore[method-assign]
    opened = CellMeasurer(operation, cell_of(operation), POLICY, ProbeSpec(copies=2), journal=journal)
    plain, together = tactic("plain"), tactic("all-b")
    opened.prepare([plain])
    prepared = len(marked)
    opened.round([plain])
    timed = len(marked)
    opened.bind(together)
    opened.run_counted(together, 2, 3)
    assert 0 < prepared < timed < len(marked) - 5
    assert marked[:timed] == [{journal_key(cell_of(operation), plain)}] * timed
    assert marked[timed:] == [{journal_key(cell_of(operation), together)}] * (len(marked) - timed)
    assert list(journal.folder.iterdir()) == []


def test_a_candidate_that_fails_in_a_window_is_out_of_this_round_and_the_next() -> None:
    opened, visits, tactics = scripted({"a": [10.0], "b": [20.0, RuntimeError("illegal memory access")]})
    assert opened.round(tactics)[tactics[1]] == Failed("RuntimeError: illegal memory access")
    visits.clear()
    assert opened.round(tactics)[tactics[1]] == Failed("RuntimeError: illegal memory access")
    assert "b" not in visits


@pytest.mark.parametrize("error", [TypeError, AttributeError, NameError, AssertionError])
def test_a_bug_in_a_backend_propagates_from_preparation(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    operation = FakeOperation("a", {"plain": 10.0})
    probe = operation.probe(1, ProbeSpec())

    def bind(wanted: Tactic) -> Any:
        raise error("a bug")

    monkeypatch.setattr(probe, "bind", bind)
    monkeypatch.setattr(operation, "probe", lambda num_tokens, spec: probe)
    with pytest.raises(error, match="a bug"):
        measurer(operation).prepare([tactic("plain")])


def test_a_bug_in_a_window_propagates() -> None:
    opened, _, tactics = scripted({"a": [TypeError("a bug")]})
    with pytest.raises(TypeError, match="a bug"):
        opened.round(tactics)


# -- wrong results, by the real layer ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class QuickConfig(md.BackendConfig):
    name = "quick"


class Quick(Backend):
    """A backend whose tactics are fast because they are wrong; `spoil` says how."""

    name = "quick"
    config_type = QuickConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: Any) -> str | None:
        return None

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: Any) -> Sequence[Tactic]:
        return [Tactic.of(self.name, fault=fault) for fault in ("none", "half", "remembered", "inside")]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        return Tactic.of(self.name, fault="none")

    def bind(self, layer: BoundLayer, wanted: Tactic) -> Runner:
        loop = TorchLoopBackend()
        right = loop.bind(layer, loop.default(layer.problem, None, torch.device("cpu")))
        held: list[torch.Tensor] = []

        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> Tactic:
            if wanted["fault"] == "half":
                half = out.shape[0] // 2
                right(
                    dataclasses.replace(acts, **{name: tensor[:half] for name, tensor in vars(acts).items() if tensor is not None}),
                    out[:half],
                )
            elif wanted["fault"] == "remembered" and held:
                out.copy_(held[0])  # the first input's result for every input
            else:
                right(acts, out)
                held.append(out.clone())
            return loop.default(layer.problem, None, torch.device("cpu")) if wanted["fault"] == "inside" else wanted

        return run


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("half", "4 of 8 rows of input set 0 were not written or are NaN, row 4 first"),
        ("remembered", "times that of plain torch"),
        ("inside", "it executed torch_loop"),
    ],
)
def test_a_fast_tactic_with_a_wrong_result_is_rejected_with_its_error(fault: str, reason: str) -> None:
    config = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=32, intermediate_size=16))
    problem = md.MoEProblem.of(config, routed=True)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 0, 0, CPU), CPU, md.BackendOptions((QuickConfig(),)), [Quick()])
    wrong, right = Tactic.of("quick", fault=fault), Tactic.of("quick", fault="none")
    opened = measurer(operation, high=8)
    opened.prepare([right, wrong])
    measured = opened.round([right, wrong])
    assert isinstance(measured[right], Timed), measured[right]
    failed = measured[wrong]
    assert isinstance(failed, Failed), f"{fault} passed for right"
    assert reason in failed.reason


# -- a captured candidate, on a graph that records -------------------------------------------------------------------------


class Graph:
    """Stands in for torch.cuda.CUDAGraph: what runs while it captures is kept, not run, and run at each replay."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.kept: list[Callable[[], object]] = []
        self.replays = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        Graph.capturing = self

    def capture_end(self) -> None:
        Graph.capturing = None

    def replay(self) -> None:
        self.replays += 1
        for call in self.kept:
            call()


class Stream:
    def __init__(self, device: torch.device) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...


class Captured(Quick):
    """Right when it is called; its `fault` shows in replays alone."""

    def bind(self, layer: BoundLayer, wanted: Tactic) -> Runner:
        right, faulty = super().bind(layer, Tactic.of("quick", fault="none")), super().bind(layer, wanted)

        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> Tactic:
            if Graph.capturing is None:
                right(acts, out)
            else:
                Graph.capturing.kept.append(lambda: faulty(acts, out))
            return wanted

        return run


def test_what_is_checked_of_a_captured_candidate_is_its_replay(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Graph] = []

    def graph() -> Graph:
        graphs.append(Graph())
        return graphs[-1]

    for name, double in (("CUDAGraph", graph), ("Stream", Stream), ("current_stream", Stream), ("graph_pool_handle", object), ("stream", contextlib.nullcontext)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure, "make_clock", lambda policy, run, copies, device, pool: GraphClock(run, copies, device, pool))
    config = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=32, intermediate_size=16))
    problem = md.MoEProblem.of(config, routed=True)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 0, 0, CPU), CPU, md.BackendOptions((QuickConfig(),)), [Captured()])
    right, half, remembered = (Tactic.of("quick", fault=fault) for fault in ("none", "half", "remembered"))
    opened = measurer(operation, policy=dataclasses.replace(POLICY, kind="cuda_graph"), high=8)
    opened.prepare([right, half, remembered])
    assert [made.replays for made in graphs] == [1, 1, 1], "one replay runs every input set"
    assert [len(made.kept) for made in graphs] == [2, 2, 2]
    measured = opened.round([right, half, remembered])
    assert isinstance(measured[right], Timed), measured[right]
    for wrong, reason in (
        (half, "4 of 8 rows of input set 0 were not written or are NaN, row 4 first"),
        (remembered, "times that of plain torch"),
    ):
        failed = measured[wrong]
        assert isinstance(failed, Failed)
        assert reason in failed.reason
