"""Our kernels beside other people's: every shape, dtype and token count in one process, on one card, with the same inputs.

Owns the matrix of `moe-dist bench kernels`, what a row holds and how it is taken: ids and router weights in, output out, quantising
included; CUDA-graph replay of calls on several inputs and routings, so that L2 serves no weights, or eager calls; contenders visited in
turn. Which of our tactics runs is the tuner's choice, made here by a pass as anyone would run it. `kernel_inputs.py` has what is called
with, `peers.py` the others, `kernel_bars.py` judges the rows. cli imports this.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from moe_dist.backends.base import MoEProblem
from moe_dist.bench.kernel_inputs import (
    DTYPES,
    EAGER_TOKENS,
    MODES,
    ROUTINGS,
    SHAPES,
    TOKENS,
    Shape,
    copies_of,
    draw_inputs,
    error_of,
    floor_us,
    spread_experts,
    truth_of,
)
from moe_dist.bench.peers import Call, Peer
from moe_dist.config import BackendOptions
from moe_dist.errors import DeviceLost, first_line
from moe_dist.layer import MoELayer
from moe_dist.operation import MoEOperation, make_random_weights
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.measure import Clock, Run, make_clock
from moe_dist.tuning.pass_terms import ProgressEvent
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.probe import GuardedOutputs
from moe_dist.tuning.problem import BucketLadder, Tactic
from moe_dist.tuning.tuner import Tuner

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to time. tokens: of graph cells; eager cells are those of them in `eager_tokens`.

    ladder: tune all powers of two up to the largest count, cold and warm, and keep the times; else the cells' own buckets alone.
    rounds: visits of every contender; window_s: the least length of one. eager_calls: of one contender, in all.
    """

    shapes: Sequence[Shape] = SHAPES
    dtypes: Sequence[str] = DTYPES
    tokens: Sequence[int] = TOKENS
    modes: Sequence[str] = MODES
    eager_tokens: Sequence[int] = EAGER_TOKENS
    ladder: bool = True
    rounds: int = 9
    window_s: float = 0.006
    eager_calls: int = 1000
    backends: BackendOptions | None = None

    def cells(self) -> Iterator[tuple[Shape, str, list[tuple[str, int]]]]:
        """(shape, dtype, its cells of mode and token count) in the order of timing."""
        for shape in self.shapes:
            for dtype in self.dtypes:
                if dtype in shape.dtypes:
                    cells = [("cuda_graph", count) for count in self.tokens if "cuda_graph" in self.modes]
                    cells += [("eager", count) for count in self.tokens if "eager" in self.modes and count in self.eager_tokens]
                    yield shape, dtype, cells


def ladder_of(tokens: Iterable[int]) -> BucketLadder:
    """The whole ladder of cells of these token counts: all powers of two up to the largest, and the counts."""
    counts = set(tokens)
    return BucketLadder(tuple(sorted({*BucketLadder.powers_of_two(max(counts)).bounds, *counts})))


def is_whole(times: Mapping[str, Any], shape: str, dtype: str, tokens: Iterable[int]) -> bool:
    """Whether tuning times are of this shape and dtype and of all buckets that cells of `tokens` have, not of a shorter ladder."""
    return (times["shape"], times["dtype"], times.get("buckets")) == (shape, dtype, len(ladder_of(tokens).bounds))


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("shape", "dtype", "tokens", "mode", "peer"))


def run_matrix(
    plan: Plan,
    peers: Sequence[Peer],
    device: torch.device,
    *,
    rows: list[Row],
    tuning: list[Row],
    save: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda line: None,
    stop_at: float | None = None,
    tag: Mapping[str, Any] | None = None,
) -> int:
    """Time what `rows` and `tuning` lack, adding to both as it comes; how many cells are left at `stop_at` (a `time.monotonic`).

    save: called after each cell. tag: fields that every new row gets. A cell that fails is a row with its reason and without times.
    DeviceLost: the card is gone for this process; what was saved stays.
    """
    left = 0
    for shape, dtype, cells in plan.cells():
        held = {row_key(row) for row in rows}
        problem = shape.problem(dtype, max_num_tokens=max(plan.tokens))
        asked = [(mode, count, [peer for peer in peers if peer.why_not(problem, count) is None]) for mode, count in cells]
        missing = [
            (mode, count, absent)
            for mode, count, able in asked
            if (absent := [peer for peer in able if (shape.name, dtype, count, mode, peer.name) not in held])
        ]
        wants_ladder = plan.ladder and not any(is_whole(row, shape.name, dtype, plan.tokens) for row in tuning)
        if not missing and not wants_ladder:
            continue
        if stop_at is not None and time.monotonic() >= stop_at:
            left += len(missing)
            continue
        note(
            f"{shape.name} {dtype}: {len(missing)} cells, {', '.join(dict.fromkeys(peer.name for *_, absent in missing for peer in absent))}"
        )
        bench = _ShapeBench(plan, shape, dtype, device, note)
        try:
            if wants_ladder:
                tuning.append(bench.tune_ladder() | dict(tag or {}))
            else:
                bench.tune_cells([(mode, count) for mode, count, _ in missing])
            save()
            for at, (mode, count, absent) in enumerate(missing):
                if stop_at is not None and time.monotonic() >= stop_at:
                    left += len(missing) - at
                    break
                rows += [row | dict(tag or {}) for row in bench.cell(mode, count, absent)]
                save()
        finally:
            bench.close()
    return left


class _ShapeBench:
    """One shape in one dtype on the device: its weights, its tuner, and its cells."""

    def __init__(self, plan: Plan, shape: Shape, dtype: str, device: torch.device, note: Callable[[str], None]) -> None:
        self._plan, self._shape, self._dtype, self._device, self._note = plan, shape, dtype, device, note
        self._config = shape.config(dtype, max_num_tokens=max(plan.tokens), backends=plan.backends)
        self._problem = MoEProblem.of(self._config, routed=True)
        self._weights = make_random_weights(self._problem, 0, 0, device)
        self._operation = MoEOperation(self._problem, self._weights, device, self._config.options)
        self._ladder = ladder_of(plan.tokens)
        self._tuner: Tuner | None = None
        self._layers: dict[bool, MoELayer] = {}
        self._ticks: list[tuple[str, float]] = []

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- tuning ---------------------------------------------------------------------------------------------------------

    def _make_tuner(self, kind: str | None = None) -> Tuner:
        graph = self._device.type == "cuda"
        policy = MeasurementPolicy(kind or ("cuda_graph" if graph else "eager"))
        tuner = Tuner(store="memory:", policy=policy, ladder=self._ladder, device=self._device, on_progress=self._tick)
        tuner.record(self._operation)
        return tuner

    def tune_ladder(self) -> Row:
        """The whole ladder three times: with no kernel compiled, with all compiled but in a process that has loaded none, from what is stored."""
        row: Row = {"shape": self._shape.name, "dtype": self._dtype, "buckets": len(self._ladder.bounds), "policy": None}
        with _empty_kernel_cache() as late:
            self._tuner = self._make_tuner()
            cold = self._tuner.run_pass()
            compile_s, _ = self._parts()
            compiled_late = len(late)
            _forget_loaded_kernels()
            with self._make_tuner() as again:
                warm = again.run_pass()
            warm_compile_s, bucket_s = self._parts()
            stored = self._tuner.run_pass()
            self._tune_eager()
        row |= {
            "policy": self._tuner.policy.kind,
            "candidates": cold.measured,
            "kernels": cold.compiled,
            "cold_s": round(cold.seconds, 2),
            "warm_s": round(warm.seconds, 2),
            "stored_s": round(stored.seconds, 2),
            "cold_compile_s": compile_s,
            "compiled_late": compiled_late,
            "warm_compile_s": warm_compile_s,
            "warm_bucket_s": bucket_s,
            "stored_hits": stored.hits,
            "rejected": sum(not reason.startswith(tuple("0123456789")) for _, _, reason in cold.rejected),
        }
        self._note(
            f"  tuned {row['buckets']} buckets: cold {row['cold_s']} s ({compile_s} compiling {cold.compiled} kernels, {compiled_late} late), "
            f"warm {row['warm_s']} s (by bucket {bucket_s}), stored {row['stored_s']} s"
        )
        return row

    def _tick(self, event: ProgressEvent) -> None:
        self._ticks.append((event.phase, time.monotonic()))

    def _parts(self) -> tuple[float, list[float]]:
        """Seconds that the last pass compiled for, and that each bucket took to be timed."""
        at = [when for phase, when in self._ticks if phase in ("measure", "commit")]
        compile_at = next((when for phase, when in self._ticks if phase == "compile"), at[0] if at else 0.0)
        self._ticks.clear()
        return round(at[0] - compile_at, 2) if at else 0.0, [round(after - before, 2) for before, after in itertools.pairwise(at)]

    def tune_cells(self, cells: Iterable[tuple[str, int]]) -> None:
        """The buckets of the cells alone."""
        counts = {count for mode, count in cells if mode == "cuda_graph"}
        buckets = [bucket for bucket in self._ladder.buckets() if bucket.high in counts]
        self._tuner = self._make_tuner()
        if buckets:
            report = self._tuner.run_pass(buckets)
            self._note(f"  tuned {len(buckets)} buckets: {report.measured} candidates, {report.compiled} kernels, {report.seconds:.1f} s")
        self._tune_eager()

    def _tune_eager(self) -> None:
        counts = [count for count in self._plan.eager_tokens if count in self._plan.tokens and "eager" in self._plan.modes]
        if self._device.type == "cuda" and counts and self._tuner is not None:
            self._tuner.run_pass([bucket for bucket in self._ladder.buckets() if bucket.high in counts], policy=MeasurementPolicy("eager"))

    # -- cells ----------------------------------------------------------------------------------------------------------

    def cell(self, mode: str, tokens: int, peers: Sequence[Peer]) -> list[Row]:
        """The rows of one cell, one a peer. What fails has a reason instead of times."""
        began = time.monotonic()
        base = {"shape": self._shape.name, "dtype": self._dtype, "tokens": tokens, "mode": mode}
        try:
            rows = [base | row for row in self._cell(mode, tokens, peers)]
        except DeviceLost:
            raise
        except (RuntimeError, MemoryError) as error:
            rows = [base | {"peer": peer.name, "reason": f"ours: {type(error).__name__}: {first_line(error)}"} for peer in peers]
        for row in rows:
            said = row.get("reason") or f"{row['peer_us']:.1f} us, ours {row['ours_us']:.1f} ({row['ratio']:.2f}x) {row['tactic']}"
            self._note(f"  {mode} {tokens}: {row['peer']} {said} [{time.monotonic() - began:.1f} s]")
        return rows

    def _layer(self) -> MoELayer:
        if not self._layers:
            self._layers[True] = MoELayer(tuner=self._tuner, **self._config)
        return self._layers[True]

    def _cell(self, mode: str, tokens: int, peers: Sequence[Peer]) -> list[Row]:
        layer, weights, bound = self._layer(), self._weights, self._operation.layer
        copies = copies_of(tokens)
        inputs = [draw_inputs(self._problem, tokens, "uniform", seed, self._device) for seed in range(copies)]
        if tokens == 1:
            spread_experts(inputs, self._shape.experts)

        def ours(acts: MoEActivationPack) -> torch.Tensor:
            return layer((acts, weights), mode=mode)

        ours(inputs[0])
        tactic = layer.lookup(tokens, mode)
        questions = [self._question(tokens, routing, 1000 + seed) for seed, routing in enumerate(ROUTINGS)]
        judged = self._judge_ours(questions, tactic)
        calls: dict[str, Call] = {"": ours}
        reasons: dict[str, str] = {}
        errors: dict[str, dict[str, float]] = {}
        for peer in peers:
            try:
                call = peer.bind(bound)
                with torch.no_grad():
                    began = time.monotonic()
                    fault, errors[peer.name] = self._judge_peer(questions, peer, call)
                    if (took := time.monotonic() - began) > SLOW_START_S:
                        self._note(f"  {peer.name} took {took:.0f} s to start at {tokens} tokens: it compiles or tunes itself")
                if fault is not None:
                    reasons[peer.name] = fault
                else:
                    calls[peer.name] = call
            except Exception as error:  # a peer may fail in any way; its row says how
                _require_device(self._device, error)
                reasons[peer.name] = f"{type(error).__name__}: {first_line(error)}"
        timed, failed = self._time(mode, calls, inputs)
        if "" in failed:
            raise RuntimeError(failed[""])
        reasons |= failed
        floor = floor_us(self._shape, self._dtype, inputs, self._device)
        rows = []
        for peer in peers:
            row: Row = {"peer": peer.name, "tactic": str(tactic)}
            if peer.name in reasons:
                rows.append(row | {"reason": reasons[peer.name]})
                continue
            row |= {"peer_us": timed[peer.name]["us"], "ours_us": timed[""]["us"], "floor_us": floor}
            row |= {"ratio": float(f"{row['peer_us'] / row['ours_us']:.5g}")}
            row |= {"peer_spread_us": timed[peer.name]["spread"], "ours_spread_us": timed[""]["spread"], "copies": copies}
            if mode == "eager":
                row |= {"peer_host_us": timed[peer.name]["host"], "ours_host_us": timed[""]["host"], "calls": self._plan.eager_calls}
            row |= {"ours_error": judged.errors, "peer_error": errors[peer.name], "same_bits": judged.same_bits}
            if judged.fault is not None:
                row |= {"fault": judged.fault}
            rows.append(row)
        return rows

    def _time(
        self, mode: str, calls: Mapping[str, Call], inputs: Sequence[MoEActivationPack]
    ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Medians and spreads of every contender, visited in turn; and who could not be timed, with the reason."""
        policy = MeasurementPolicy("cuda_graph" if mode == "cuda_graph" else "eager")
        clocks: dict[str, Clock] = {}
        numbers: dict[str, int] = {}
        failed: dict[str, str] = {}
        with torch.no_grad():
            for name, call in calls.items():
                try:
                    run = _run_of(call, inputs)
                    for index in range(len(inputs)):
                        run(index)
                    clock = make_clock(policy, run, len(inputs), self._device)
                    clock.window(len(inputs))
                    call_us = max(clock.window(len(inputs)), 0.1)
                except Exception as error:  # who can't be captured is out of this cell alone
                    _require_device(self._device, error)
                    failed[name] = f"{type(error).__name__}: {first_line(error)}"
                    continue
                clocks[name], numbers[name] = clock, max(len(inputs), round(self._plan.window_s * 1e6 / call_us))
            if mode == "eager":
                numbers = dict.fromkeys(clocks, -(-self._plan.eager_calls // self._plan.rounds))
            windows: dict[str, list[float]] = {name: [] for name in clocks}
            order = list(clocks)
            for visit in range(self._plan.rounds):
                for name in order[visit % len(order) :] + order[: visit % len(order)]:
                    windows[name].append(clocks[name].window(numbers[name]))
            found = {
                name: {"us": round(statistics.median(times), 3), "spread": round((max(times) - min(times)) / 2, 3)}
                for name, times in windows.items()
            }
            if mode == "eager":
                for name in clocks:
                    found[name]["host"] = round(host_us(_run_of(calls[name], inputs), len(inputs), self._plan.eager_calls, self._device), 3)
        return found, failed

    # -- right or wrong -------------------------------------------------------------------------------------------------

    def _question(self, tokens: int, routing: str, seed: int) -> _Question:
        acts = draw_inputs(self._problem, tokens, routing, seed, self._device)
        return _Question(routing, acts, truth_of(self._operation.layer, acts))

    def _judge_ours(self, questions: Sequence[_Question], tactic: Tactic) -> _Judged:
        """The tactic's errors on fresh inputs; its output is poisoned and lies between guard bytes."""
        run = self._operation.bind(tactic)
        outputs = GuardedOutputs(tuple(questions[0].acts.hidden_states.shape), self._problem.dtype, 2, self._device)
        errors: dict[str, float] = {}
        fault, same = None, True
        with torch.no_grad():
            for question in questions:
                outputs.poison()
                for out in outputs.tensors:
                    executed = run(question.acts, out)
                    if executed != tactic:
                        fault = fault or f"{question.routing}: it executed {executed} instead of {tactic}"
                fault = fault or ((found := outputs.fault()) and f"{question.routing}: {found}")
                same = same and torch.equal(*outputs.tensors)
                errors[question.routing] = error_of(outputs.tensors[0], question.truth)
        return _Judged(errors, fault, same)

    def _judge_peer(self, questions: Sequence[_Question], peer: Peer, call: Call) -> tuple[str | None, dict[str, float]]:
        """The same inputs for a peer. Its output is memory of its own: what lies freed is poisoned, so that rows left out show."""
        errors: dict[str, float] = {}
        for question in questions:
            acts, truth, routing = question.acts, question.truth, question.routing
            if peer.route is not None:
                truth = truth_of(self._operation.layer, peer.route(acts, self._problem))
            before = acts.hidden_states.clone()
            freed = [torch.full_like(acts.hidden_states, torch.nan) for _ in range(4)]
            del freed
            out = call(acts)
            if out.shape != acts.hidden_states.shape or out.dtype != self._problem.dtype:
                return f"its output is {list(out.shape)} {out.dtype}", errors
            if bool(out.isnan().any()):
                return f"{routing}: {int(out.isnan().any(1).sum())} of {len(out)} rows hold NaN", errors
            if not torch.equal(acts.hidden_states, before):
                acts.hidden_states.copy_(before)  # the next peer gets what was meant
                return f"{routing}: it changed hidden_states", errors
            errors[routing] = error_of(out, truth)
            if not errors[routing] <= WRONG:
                return f"{routing}: its error is {errors[routing]:.3g} of the result, above {WRONG:g}: it computes something else", errors
        return None, errors


SLOW_START_S = 5.0
WRONG = 0.2  # an error that no rounding explains


@dataclasses.dataclass(frozen=True)
class _Judged:
    errors: dict[str, float]
    fault: str | None
    same_bits: bool


@dataclasses.dataclass(frozen=True)
class _Question:
    """Fresh inputs, and the fp32 truth of some of their rows."""

    routing: str
    acts: MoEActivationPack
    truth: torch.Tensor


def host_us(run: Run, copies: int, calls: int, device: torch.device) -> float:
    """What a call costs the host: `calls` in batches that the device's queue takes, which is drained between them, not within the time.

    The median of the batches: what else the host does for a moment is in none or in few of them."""
    batch, spent = 40, []
    for _ in range(-(-calls // batch)):
        _synchronize(device)
        began = time.perf_counter_ns()
        for index in range(batch):
            run(index % copies)
        spent.append(time.perf_counter_ns() - began)
    _synchronize(device)
    return statistics.median(spent) / batch / 1e3


def _run_of(call: Call, inputs: Sequence[MoEActivationPack]) -> Run:
    def run(index: int) -> Tactic:
        return cast(Tactic, call(inputs[index]))  # no clock looks at what a run returns

    return run


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _require_device(device: torch.device, error: BaseException) -> None:
    """DeviceLost: after `error` the card answers nothing any more."""
    try:
        _synchronize(device)
    except RuntimeError as sticky:
        raise DeviceLost(f"{device} is lost to this process: {first_line(error)}; run again, the rows so far are kept") from sticky


@contextmanager
def _empty_kernel_cache() -> Iterator[list[str]]:
    """A triton cache folder of its own for the block, and no kernel of ours loaded at its start. Gives the kernels that this process compiles."""
    late: list[str] = []
    if (triton := sys.modules.get("triton")) is None:  # no backend that compiles is in this process
        yield late
        return

    def listen(*, src: Any, cache_hit: bool, **rest: object) -> None:
        if not cache_hit:
            late.append(src.name)

    before, listened = triton.knobs.cache.dir, triton.knobs.compilation.listener
    with tempfile.TemporaryDirectory(prefix="moe-dist-kernels-") as folder:
        triton.knobs.cache.dir, triton.knobs.compilation.listener = folder, listen
        _forget_loaded_kernels()
        try:
            yield late
        finally:
            triton.knobs.cache.dir, triton.knobs.compilation.listener = before, listened


def _forget_loaded_kernels() -> None:
    """Make this process compile or load our kernels anew: what layers hold goes on, what is bound from now on starts afresh."""
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_dist_kernels"):
            for value in vars(module).values():
                if hasattr(value, "device_caches"):
                    value.device_caches.clear()
