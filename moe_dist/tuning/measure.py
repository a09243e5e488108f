"""Takes the time of candidates on this rank: clocks, interleaved rounds, the output check. Knows no store, key or rank.

What is timed is what serving pays (see `MeasurementPolicy`). Preparation - compile, poison, capture, warm-up - ends and
is synchronized before a window opens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from moe_dist.errors import DeviceLost, first_line
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Cell, Failed, Measurement, Operation, Probe, ProbeSpec, Tactic, Timed, digest

MAX_CALLS = 200
# Of a policy's window, where only the device is timed: what longer windows average out is the host's noise.
DEVICE_WINDOW_SHARE = 0.4
# The default is timed first and last in a round; apart by more than this, the machine changed under it and the round is repeated once.
UNSTABLE_RATIO = 1.15

Run = Callable[[int], Tactic]
T = TypeVar("T")


class Journal(Protocol):
    """Remembers which candidate was running when a process died (`journal.py`)."""

    def running(self, tactic_key: str) -> AbstractContextManager[None]: ...
    def timing(self) -> AbstractContextManager[Callable[[str], None]]: ...


class Clock(Protocol):
    """One prepared candidate's stopwatch."""

    def window(self, calls: int) -> float:
        """Microseconds per call over about `calls` calls."""


class EagerClock:
    """Wall clock around calls back to back and the synchronization that ends them: host and device, no delay kernel."""

    def __init__(self, run: Run, copies: int, device: torch.device) -> None:
        self._run, self._copies, self._device = run, copies, device

    def window(self, calls: int) -> float:
        _synchronize(self._device)
        start = time.perf_counter_ns()
        for index in range(calls):
            self._run(index % self._copies)
        _synchronize(self._device)
        return (time.perf_counter_ns() - start) / 1e3 / calls


class EventClock:
    """Device time between two events around calls back to back."""

    def __init__(self, run: Run, copies: int, device: torch.device) -> None:
        self._run, self._copies, self._device = run, copies, device

    def window(self, calls: int) -> float:
        start, end = _event(), _event()
        _synchronize(self._device)
        start.record()
        for index in range(calls):
            self._run(index % self._copies)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls


class GraphClock:
    """Device time of replays of one graph that holds a call on each input set. What can't be captured raises here; nothing is replayed yet.

    pool: memory that the graphs of one cell share; they are replayed one at a time and read nothing that another left.
    Called like the run that it holds, it replays: so what is checked is what is timed.
    """

    def __init__(self, run: Run, copies: int, device: torch.device, pool: Any = None) -> None:
        self._copies, self._device = copies, device
        self.tactic = getattr(run, "tactic", None)  # what was asked for, as the run says
        self._run = run  # the graph reads what it holds: bound weights, index tensors, scratch
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run(0)
        torch.cuda.current_stream(device).wait_stream(stream)
        _synchronize(device)
        # Not by `torch.cuda.graph`, which gives all cached memory back at each capture, so that every candidate would ask for it anew.
        with torch.cuda.stream(stream):
            # thread_local: what other threads of the process do meanwhile (a communicator's watchdog) can't spoil the capture.
            self._graph.capture_begin(torch.cuda.graph_pool_handle() if pool is None else pool, capture_error_mode="thread_local")
            try:
                self._executed = [run(index) for index in range(copies)]
            finally:
                self._graph.capture_end()

    def __call__(self, index: int) -> Tactic:
        """The calls on all input sets, with the first; the tactic that was captured for input set `index`."""
        if index == 0:
            self._graph.replay()
        return self._executed[index]

    def window(self, calls: int) -> float:
        replays = max(1, round(calls / self._copies))
        start, end = _event(), _event()
        _synchronize(self._device)
        start.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / (replays * self._copies)


def make_clock(policy: MeasurementPolicy, run: Run, copies: int, device: torch.device, pool: Any = None) -> Clock:
    """The clock of `policy`; on a CPU, host time is the device's, so `auto` and `eager` are one."""
    if device.type != "cuda" or policy.kind == "eager":
        return EagerClock(run, copies, device)
    return GraphClock(run, copies, device, pool) if policy.kind == "cuda_graph" else EventClock(run, copies, device)


class CellMeasurer:
    """Times the candidates of one cell on this rank. Open with `prepare`, then one `round` after the other.

    progress is called at every candidate: the liveness that peers see moves with the work.
    """

    def __init__(
        self,
        operation: Operation,
        cell: Cell,
        policy: MeasurementPolicy,
        spec: ProbeSpec,
        *,
        journal: Journal | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._operation, self._cell, self._policy, self._spec = operation, cell, policy, spec
        self._journal, self._progress = journal, progress
        self._clocks: dict[Tactic, Clock] = {}
        self._failed: dict[Tactic, Failed] = {}
        self._call_us: dict[Tactic, float] = {}
        self._probe: Probe | None = None
        self._bound: dict[Tactic, Run] = {}
        self._device_time = operation.device.type == "cuda" and policy.kind != "eager"
        self._pool: Any = torch.cuda.graph_pool_handle() if policy.kind == "cuda_graph" else None

    def prepare(self, tactics: Iterable[Tactic]) -> None:
        """Compile, check and warm up every candidate that is not ready yet. What fails is remembered with its reason, not raised."""
        tactics = [tactic for tactic in tactics if tactic not in self._clocks and tactic not in self._failed]
        try:
            self._probe = probe = self._probe or self._operation.probe(self._cell.bucket.high, self._spec)
        except (MemoryError, RuntimeError) as error:
            if (reason := _out_of_memory(error)) is None:
                raise
            self._failed.update((tactic, Failed(reason)) for tactic in tactics)
            return
        if self._pool is not None:
            torch.cuda.empty_cache()  # the graphs' pool can't use what lies cached outside of it
        for tactic in tactics:
            self._progress()
            with self._journaled(tactic):
                reason = self._prepare_one(probe, tactic)
            if reason is not None:
                self._failed[tactic] = Failed(reason)
                self._clocks.pop(tactic, None)

    def round(self, alive: Sequence[Tactic], *, sweeps: int | None = None) -> dict[Tactic, Measurement]:
        """One interleaved round over `alive`: every candidate's median and spread, or its failure. The others' graphs are let go."""
        for dropped in self._clocks.keys() - set(alive):
            del self._clocks[dropped]
        measured: dict[Tactic, Measurement] = {tactic: self._failed[tactic] for tactic in alive if tactic in self._failed}
        ready = [tactic for tactic in alive if tactic in self._clocks]
        if not ready:
            return measured
        for attempt in range(2):
            windows, stable = self._sweep(ready, sweeps or self._policy.sweeps)
            if stable or attempt:
                break
        for tactic, times in windows.items():
            spread = (max(times) - min(times)) / 2
            measured[tactic] = self._failed.get(tactic) or Timed(statistics.median(times), spread, len(times))
        return measured

    def bind(self, tactic: Tactic) -> str | None:
        """Prepare a collective tactic without running it; the reason why it can't run here, or None."""
        try:
            self._probe = probe = self._probe or self._operation.probe(self._cell.bucket.high, self._spec)
        except (MemoryError, RuntimeError) as error:
            if (reason := _out_of_memory(error)) is None:
                raise
            return reason
        self._progress()
        run, reason = self._attempt(lambda: probe.bind(tactic))
        if run is not None:
            self._bound[tactic] = run
        return reason

    def run_counted(self, tactic: Tactic, windows: int, calls: int) -> Measurement:
        """Check and time a bound collective tactic by runs whose number is the same on all ranks: copies, then windows * calls.

        A failure ends this rank's part; its peers' waits on the device are bounded by the tactic itself.
        """
        probe, run = self._probe, self._bound[tactic]
        assert probe is not None, "run_counted follows bind"
        self._progress()
        with self._journaled(tactic):
            fault, raised = self._attempt(lambda: probe.check(run))
            if (reason := raised or fault) is not None:
                return Failed(reason)
            clock, reason = self._attempt(lambda: make_clock(self._policy, run, probe.copies, self._operation.device, self._pool))
            times: list[float] = []
            while clock is not None and len(times) < windows:
                self._progress()
                elapsed, reason = self._attempt(lambda: clock.window(calls))
                if elapsed is None:
                    break
                times.append(elapsed)
        return Failed(reason) if reason is not None else Timed(statistics.median(times), (max(times) - min(times)) / 2, len(times))

    def _journaled(self, tactic: Tactic) -> AbstractContextManager[None]:
        """While the block runs, a death of this process is the candidate's."""
        return self._journal.running(journal_key(self._cell, tactic)) if self._journal else nullcontext()

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """What `action` gives, or the reason why this candidate is out."""
        try:
            return action(), None
        except (MemoryError, RuntimeError) as error:
            if (reason := _out_of_memory(error)) is not None:
                return None, reason
            self._require_device(error)
            return None, f"{type(error).__name__}: {first_line(error)}"
        except (TypeError, AttributeError, NameError, AssertionError):
            raise  # a bug, not a property of this candidate: it must be seen
        except Exception as error:  # kernels and compilers raise types of their own; the record keeps the reason
            return None, f"{type(error).__name__}: {first_line(error)}"

    def _require_device(self, error: Exception) -> None:
        """DeviceLost: after `error` the device answers nothing any more, so that no candidate can be judged in this process."""
        try:
            _synchronize(self._operation.device)
        except RuntimeError as sticky:
            raise DeviceLost(f"{self._operation.device} is lost to this process: {first_line(error)}; restart it") from sticky

    def _prepare_one(self, probe: Probe, tactic: Tactic) -> str | None:
        """The reason why `tactic` is out, or None."""

        def prepare() -> str | None:
            device = self._operation.device
            run = probe.bind(tactic)
            clock = make_clock(self._policy, run, probe.copies, device, self._pool)
            if (fault := probe.check(clock if isinstance(clock, GraphClock) else run)) is not None:
                return fault
            start = time.perf_counter_ns()
            run(0)
            _synchronize(device)
            self._call_us[tactic] = max((time.perf_counter_ns() - start) / 1e3, 1.0)
            self._clocks[tactic] = clock
            return None

        fault, raised = self._attempt(prepare)
        if raised is not None and self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()  # a capture that fails leaves its pool unfit for another
        return raised or fault

    def _sweep(self, ready: list[Tactic], sweeps: int) -> tuple[dict[Tactic, list[float]], bool]:
        """`sweeps` visits of every candidate, each time starting at another one, so that drift hits all alike."""
        keys = {tactic: journal_key(self._cell, tactic) for tactic in ready} if self._journal else {}
        window_us = self._policy.window.total_seconds() * 1e6 * (DEVICE_WINDOW_SHARE if self._device_time else 1.0)
        windows: dict[Tactic, list[float]] = {tactic: [] for tactic in ready}
        anchor: list[float] = []
        with self._journal.timing() if self._journal else nullcontext(_unmarked) as mark:
            for sweep in range(sweeps):
                for index in range(len(ready)):
                    tactic = ready[(index + sweep) % len(ready)]
                    if tactic in self._failed:
                        continue
                    self._progress()
                    calls = max(1, min(MAX_CALLS, round(window_us / self._call_us[tactic])))
                    mark(keys.get(tactic, ""))
                    try:
                        elapsed = self._clocks[tactic].window(calls)
                    except (MemoryError, RuntimeError) as error:
                        if isinstance(error, RuntimeError):
                            self._require_device(error)
                        self._failed[tactic] = Failed(f"{type(error).__name__}: {first_line(error)}")
                        continue
                    windows[tactic].append(elapsed)
                    if tactic == ready[0]:
                        anchor.append(elapsed)
        stable = len(anchor) < 2 or (anchor[-1] <= anchor[0] * UNSTABLE_RATIO and anchor[0] <= anchor[-1] * UNSTABLE_RATIO)
        return {tactic: times for tactic, times in windows.items() if times}, stable


def _unmarked(tactic_key: str) -> None:
    """Where there is no journal."""


def journal_key(cell: Cell, tactic: Tactic) -> str:
    """Names a candidate of a cell in the journal."""
    return f"{digest(cell)} {tactic}"


def _out_of_memory(error: BaseException) -> str | None:
    """How `error` is told where it says that memory ran out; None: it says something else."""
    # Of host memory torch says so in a plain RuntimeError.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return f"out of memory in preparation: {first_line(error)}"
    return None


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
