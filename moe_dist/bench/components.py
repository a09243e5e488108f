"""Where the time of one MoE call goes: the call as it is served, and its parts one by one.

A backend runs a call as a whole, so the parts are measured on the same tensors by plain torch pieces, and the total by the tactic
that serves the call. People read this, through the public names and `repro.py`; no decision does.
Shapes: T tokens, K slots, R rows sorted by expert, H hidden, I local intermediate.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

from moe_dist.backends.base import TORCH_DTYPES, BoundLayer, MoEProblem
from moe_dist.backends.routing import select
from moe_dist.backends.torch_grouped import TorchGroupedBackend, grouped_product, sort_slots, unsorted
from moe_dist.backends.torch_ops import activate, dequantise, finalize
from moe_dist.checks import bind_weights, output_shape
from moe_dist.errors import ConfigError, InputError
from moe_dist.layer import MoELayer, MoETensors
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.measure import Run, make_clock
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Tactic, Timed

PARTS = ("routing", "gemm1", "activation", "gemm2", "finalize")
MAX_CALLS = 200  # of one window


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentTimes:
    """Medians of one call, in microseconds, as `policy` takes time.

    total_us: the call by `tactic`. The others: its parts by plain torch `pieces`, on the same tensors; a tactic that fuses or
    orders them otherwise takes less than their sum. routing: choose experts, sort the slots by expert and gather their rows;
    gemm1, gemm2: the two products with their biases, quantised weights dequantised on the way; finalize: back into the order of
    tokens, weighted and summed.
    """

    num_tokens: int
    policy: str
    tactic: Tactic
    pieces: str
    routing_us: float
    gemm1_us: float
    activation_us: float
    gemm2_us: float
    finalize_us: float
    total_us: float

    def __str__(self) -> str:
        rows = [f"{name:<12}{getattr(self, f'{name}_us'):>12.1f}" for name in (*PARTS, "total")]
        return "\n".join(
            [
                f"{self.num_tokens} tokens, {self.policy}: microseconds of one call",
                *rows,
                f"total is of {self.tactic}; the parts are plain torch pieces ({self.pieces}) and need not add up to it",
            ]
        )


def benchmark(layer: MoELayer, tensors: MoETensors, *, part: str = "total", policy: MeasurementPolicy | None = None) -> Timed:
    """The time of one call of `layer` on `tensors`, as it is served, or of one part: routing, gemm1, activation, gemm2, finalize.

    policy: None: "eager". "eager" and "auto" time the eager mode's tactic, "cuda_graph" that of its mode. A part is measured as `ComponentTimes`
    says. The same tensors come back call after call, so caches serve more than they would serving a model: compare parts and
    tactics by this, not machines.
    InputError: the tensors don't fit, or have no tokens. ConfigError: no such part, or a policy that the device lacks.
    """
    if part not in (*PARTS, "total"):
        raise ConfigError(f"part is {part!r}; choose one of {', '.join((*PARTS, 'total'))}")
    policy = policy or MeasurementPolicy()
    bound, acts, _, call = _served(layer, tensors, policy)
    if part == "total":
        return _time({"total": call}, policy, bound)["total"]
    pieces = _Pieces(bound, acts)
    return _time({part: getattr(pieces, part)}, policy, bound)[part]


def benchmark_all(layer: MoELayer, tensors: MoETensors, *, policy: MeasurementPolicy | None = None) -> ComponentTimes:
    """Every part of a call, and the call as it is served; `benchmark`'s arguments and errors."""
    policy = policy or MeasurementPolicy()
    bound, acts, tactic, call = _served(layer, tensors, policy)
    return component_times(bound, acts, tactic, call, policy)


def component_times(
    layer: BoundLayer, acts: MoEActivationPack, tactic: Tactic, call: Callable[[], object], policy: MeasurementPolicy
) -> ComponentTimes:
    """The parts of a call of `layer` on `acts`, and `call`, which runs it by `tactic`. Errors: `benchmark`'s."""
    _check(acts, layer.weights.w13.device, policy)
    pieces = _Pieces(layer, acts)
    timed = _time({**{part: getattr(pieces, part) for part in PARTS}, "total": call}, policy, layer)
    return ComponentTimes(
        num_tokens=acts.hidden_states.shape[0],
        policy=policy.kind,
        tactic=tactic,
        pieces=pieces.method,
        routing_us=timed["routing"].median_us,
        gemm1_us=timed["gemm1"].median_us,
        activation_us=timed["activation"].median_us,
        gemm2_us=timed["gemm2"].median_us,
        finalize_us=timed["finalize"].median_us,
        total_us=timed["total"].median_us,
    )


def _check(acts: MoEActivationPack, device: torch.device, policy: MeasurementPolicy) -> None:
    policy.modes(device.type)
    if not acts.hidden_states.shape[0]:
        raise InputError("hidden_states has 0 tokens; give at least 1, a call without tokens runs nothing")


def _served(
    layer: MoELayer, tensors: MoETensors, policy: MeasurementPolicy
) -> tuple[BoundLayer, MoEActivationPack, Tactic, Callable[[], object]]:
    """What `layer` does with `tensors`: bound weights, activations, the tactic, and the call itself."""
    acts, weights = tensors
    _check(acts, weights.w13.device, policy)
    problem = MoEProblem.of(layer.config, routed=acts.router_logits is None)
    mode = "cuda_graph" if policy.kind == "cuda_graph" else "eager"
    output = layer.config.execution.output
    if output == "in_place":  # the caller's own hidden states stay what they are
        acts = dataclasses.replace(acts, hidden_states=acts.hidden_states.clone())
    num_tokens = acts.hidden_states.shape[0]
    out = acts.hidden_states.new_empty(output_shape(problem, num_tokens)) if output == "given" else None

    def call() -> object:
        return layer((acts, weights), mode=mode, out=out)

    call()  # checks the tensors, and builds the index that `lookup` reads
    return bind_weights(problem, weights), acts, layer.lookup(num_tokens, mode), call


class _Pieces:
    """The parts of one call, each on what the part before left when this was made. Sorted by expert, as backend torch_grouped works."""

    def __init__(self, layer: BoundLayer, acts: MoEActivationPack) -> None:
        config = layer.problem.config
        self._layer, self._acts = layer, acts
        device = acts.hidden_states.device
        default = TorchGroupedBackend().default(layer.problem, None, device)
        self.method = f"{default['method']} in {default['compute']}"
        self._grouped, self._compute = default["method"] == "grouped_mm", TORCH_DTYPES[str(default["compute"])]
        self._on_input = config.routing.weight_on_input
        self._experts = torch.arange(layer.num_local_experts, device=device)
        self._out = acts.hidden_states.new_empty(output_shape(layer.problem, acts.hidden_states.shape[0]))
        with torch.no_grad():
            self._rows_TK, self._weights_TK, self._order, self._ends, self._x_RH = self.routing()
            self._stops = self._ends.tolist()
            self._h = self.gemm1()
            self._a_RI = self.activation()
            self._y_RH = self.gemm2()
            self.finalize()

    def routing(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        rows_TK, weights_TK = select(self._layer, self._acts)
        order, ends = sort_slots(rows_TK, self._experts)
        x = self._acts.hidden_states[order // rows_TK.shape[1]]
        if self._on_input:
            x = x * weights_TK.flatten()[order, None]
        return rows_TK, weights_TK, order, ends, x.to(self._compute)

    def gemm1(self) -> torch.Tensor:
        weights = self._layer.weights
        return self._product(self._x_RH, weights.w13, weights.w13_scale, weights.w13_bias)

    def activation(self) -> torch.Tensor:
        return activate(self._h, self._layer.problem.config.activation).to(self._compute)

    def gemm2(self) -> torch.Tensor:
        weights = self._layer.weights
        return self._product(self._a_RI, weights.w2, weights.w2_scale, weights.w2_bias)

    def finalize(self) -> torch.Tensor:
        y_TKH = unsorted(self._y_RH, self._order).view(*self._rows_TK.shape, self._y_RH.shape[1])
        finalize(y_TKH, self._rows_TK, None if self._on_input else self._weights_TK, self._out)
        return self._out

    def _product(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """[R, columns] -> [R, out]; rows of remote slots are zero, or hold anything."""
        if self._grouped:
            return grouped_product(x, weight, bias, self._ends)
        y = x.new_zeros(x.shape[0], weight.shape[1])
        start = 0
        for expert, end in enumerate(self._stops):
            if end > start:
                plain = weight[expert] if scale is None else dequantise(weight[expert], scale[expert], self._layer.problem.config.quant)
                expert_bias = None if bias is None else bias[expert].to(self._compute)
                y[start:end] = F.linear(x[start:end], plain.to(self._compute), expert_bias)
            start = end
        return y


def _time(parts: dict[str, Callable[[], object]], policy: MeasurementPolicy, layer: BoundLayer) -> dict[str, Timed]:
    """Each part's median, and half its range, over windows that visit the parts in turn, so that drift hits all alike."""
    device = layer.weights.w13.device

    def runner(part: Callable[[], object]) -> Run:
        return lambda _: cast(Tactic, part())  # no clock looks at what a run returns

    with torch.no_grad():
        clocks = {name: make_clock(policy, runner(part), 1, device) for name, part in parts.items()}
        window_us = policy.window.total_seconds() * 1e6
        calls = {}
        for name, clock in clocks.items():
            clock.window(1)
            calls[name] = max(1, min(MAX_CALLS, round(window_us / max(clock.window(1), 1.0))))
        windows: dict[str, list[float]] = {name: [] for name in clocks}
        for _ in range(policy.rounds * policy.sweeps):
            for name, clock in clocks.items():
                windows[name].append(clock.window(calls[name]))
    return {name: Timed(statistics.median(times), (max(times) - min(times)) / 2, len(times)) for name, times in windows.items()}
