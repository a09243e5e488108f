"""A second opinion on what a MoE layer computes, in numpy and float64, written from the formulas and sharing no code with moe_dist.

Also what tests of backends share: whole models cut into ranks' shares, and a run on guarded, poisoned outputs.
Shapes: T tokens, K slots, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

import moe_dist as md
from moe_dist.backends.base import TORCH_DTYPES
from moe_dist.backends.registry import get_backend
from moe_dist.checks import bind_weights
from moe_dist.tuning.probe import GuardedOutputs

CPU = torch.device("cpu")
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-17}


@dataclasses.dataclass
class Case:
    """A whole model (weights of all experts, uncut) and one batch for it."""

    config: md.MoEConfig
    whole: md.MoEWeightPack
    acts: md.MoEActivationPack

    @property
    def problem(self) -> md.MoEProblem:
        return md.MoEProblem.of(self.config, routed=self.acts.router_logits is None)

    def share(self, ep_rank: int = 0, tp_rank: int = 0) -> md.MoEWeightPack:
        """The weights that one rank holds: its experts, its columns of the intermediate; w2's bias on TP rank 0 alone."""
        parallel, whole = self.config.parallel, self.whole
        rows = list(experts_of(self.config, ep_rank))
        width = self.config.experts.intermediate_size // parallel.tp_size
        cut = slice(tp_rank * width, (tp_rank + 1) * width)
        halves = 2 if self.config.activation.gated else 1

        def cut13(weight: torch.Tensor | None) -> torch.Tensor | None:  # gate rows and up rows are each cut
            if weight is None:
                return None
            parts = weight[rows].chunk(halves, dim=1)
            return torch.cat([part[:, cut] for part in parts], 1).contiguous()

        assert parallel.tp_size == 1 or whole.w13_scale is None, "cutting scales is not needed by any test"
        w13 = cut13(whole.w13)
        assert w13 is not None
        return md.MoEWeightPack(
            w13=w13,
            w2=whole.w2[rows][:, :, cut].contiguous(),
            w13_bias=cut13(whole.w13_bias),
            w2_bias=None if whole.w2_bias is None or tp_rank else whole.w2_bias[rows],
            w13_scale=None if whole.w13_scale is None else whole.w13_scale[rows],
            w2_scale=None if whole.w2_scale is None else whole.w2_scale[rows],
            correction_bias=whole.correction_bias,
            ep_rank=ep_rank,
            tp_rank=tp_rank,
        )


def experts_of(config: md.MoEConfig, ep_rank: int) -> range:
    """Global ids on a rank: round robin, or ranges of which the first ones are longer by one."""
    total, ranks = config.routing.num_experts, config.parallel.ep_size
    if ranks == 1:
        return range(config.routing.total_experts)
    if config.parallel.placement == "round_robin":
        return range(ep_rank, total, ranks)
    sizes = [total // ranks + (1 if rank < total % ranks else 0) for rank in range(ranks)]
    return range(sum(sizes[:ep_rank]), sum(sizes[: ep_rank + 1]))


def make_case(
    config: md.MoEConfig, tokens: int, *, ids: list[list[int]] | None = None, routed: bool = True, seed: int = 0, scale: float = 1.0
) -> Case:
    """Random weights with results about as large as the inputs, and a batch; `ids` overrides the random choice of experts."""
    generator = torch.Generator().manual_seed(seed)
    routing, hidden, inter = config.routing, config.experts.hidden_size, config.experts.intermediate_size
    experts, dtype = routing.total_experts, TORCH_DTYPES[config.quant.dtype]
    width = inter * (2 if config.activation.gated else 1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = randn(experts, rows, columns) / columns**0.5
        quant = config.quant
        if quant.weight is None:
            return values.to(dtype), None
        if quant.granularity == "tensor":
            shape: tuple[int, ...] = (experts,)
        elif quant.granularity == "channel":
            shape = (experts, rows)
        else:
            assert quant.block_shape is not None
            shape = (experts, math.ceil(rows / quant.block_shape[0]), math.ceil(columns / quant.block_shape[1]))
        # Scales differ by up to 4, so that a scale of a neighbouring block, or none, is far off.
        return (values * 50).to(torch.float8_e4m3fn), (0.5 + 1.5 * torch.rand(shape, generator=generator)) / 50

    w13, w13_scale = weight(width, hidden)
    w2, w2_scale = weight(hidden, inter)
    bias = config.experts.bias
    whole = md.MoEWeightPack(
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_bias=randn(experts, width).to(dtype) if bias else None,
        w2_bias=randn(experts, hidden).to(dtype) if bias else None,
        correction_bias=randn(routing.num_experts) * 0.2 if routing.correction_bias else None,
    )
    x = (scale * randn(tokens, hidden)).to(dtype)
    logits = randn(tokens, routing.num_experts) * 2
    if not routed:
        return Case(config, whole, md.MoEActivationPack(hidden_states=x, router_logits=logits))
    chosen = logits.argsort(1)[:, : routing.top_k]
    shared = torch.arange(routing.num_experts, experts).expand(tokens, -1)
    topk_ids = torch.cat([chosen, shared], 1).int() if ids is None else torch.tensor(ids, dtype=torch.int32).view(tokens, routing.slots)
    topk_weights = torch.rand(tokens, routing.slots, generator=generator) + 0.1
    return Case(config, whole, md.MoEActivationPack(hidden_states=x, topk_ids=topk_ids, topk_weights=topk_weights))


def f64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy().astype(np.float64)


def dequantised(config: md.MoEConfig, weight: torch.Tensor, scale: torch.Tensor | None) -> np.ndarray:
    values = f64(weight)
    if scale is None:
        return values
    rows, columns = np.arange(values.shape[1]), np.arange(values.shape[2])
    if config.quant.granularity == "tensor":
        return values * f64(scale)[:, None, None]
    if config.quant.granularity == "channel":
        return values * f64(scale)[:, :, None]
    assert config.quant.block_shape is not None
    high, wide = config.quant.block_shape
    return values * f64(scale)[:, (rows // high)[:, None], (columns // wide)[None, :]]


def activated(h: np.ndarray, activation: md.ActivationConfig) -> np.ndarray:
    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    limit = math.inf if activation.limit is None else activation.limit
    if activation.kind in ("relu2", "gelu", "silu"):
        h = np.clip(h, -limit, limit)
        if activation.kind == "relu2":
            return np.maximum(h, 0) ** 2
        return gelu(h) if activation.kind == "gelu" else h / (1 + np.exp(-h))
    half = h.shape[-1] // 2
    gate, up = np.minimum(h[..., :half], limit), np.clip(h[..., half:], -limit, limit)
    return (gate / (1 + np.exp(-activation.alpha * gate)) if activation.kind == "swiglu" else gelu(gate)) * (up + activation.beta)


def oracle(case: Case, ep_rank: int = 0, tp_rank: int = 0, *, rounded_to: torch.dtype | None = None) -> np.ndarray:
    """float64 [T, H] or [T, K, H]: what this rank must return for a routed case. rounded_to: round each step's result to that
    format, as plain torch would: the yardstick of what a format may err."""

    def step(values: np.ndarray) -> np.ndarray:
        return values if rounded_to is None else f64(torch.from_numpy(values).to(rounded_to))

    config, pack = case.config, case.share(ep_rank, tp_rank)
    assert case.acts.topk_ids is not None
    assert case.acts.topk_weights is not None
    w13, w2 = dequantised(config, pack.w13, pack.w13_scale), dequantised(config, pack.w2, pack.w2_scale)
    ids, scores, x = case.acts.topk_ids.numpy(), f64(case.acts.topk_weights), f64(case.acts.hidden_states)
    slots = np.zeros((*ids.shape, config.experts.hidden_size))
    for row, expert in enumerate(experts_of(config, ep_rank)):
        token, slot = np.nonzero(ids == expert)
        weight = scores[token, slot][:, None]
        inputs = step(x[token] * (weight if config.routing.weight_on_input else 1))
        h = step(inputs @ w13[row].T + (0 if pack.w13_bias is None else f64(pack.w13_bias)[row]))
        y = step(step(activated(h, config.activation)) @ w2[row].T + (0 if pack.w2_bias is None else f64(pack.w2_bias)[row]))
        slots[token, slot] = y * (1 if config.routing.weight_on_input else weight)
    return step(slots.sum(1) if config.execution.do_finalize else slots)


def run(tactic: md.Tactic, problem: md.MoEProblem, weights: md.MoEWeightPack, acts: md.MoEActivationPack) -> torch.Tensor:
    """Run `tactic` on a poisoned output between guards; it must fill all of it, nothing else, and be what was executed."""
    tokens, config = acts.hidden_states.shape[0], problem.config
    shape = (
        (tokens, config.experts.hidden_size) if config.execution.do_finalize else (tokens, config.routing.slots, config.experts.hidden_size)
    )
    outputs = GuardedOutputs(shape, problem.dtype, 1, CPU)
    with torch.no_grad():
        executed = get_backend(tactic.backend).bind(bind_weights(problem, weights), tactic)(acts, outputs.tensors[0])
    assert executed == tactic
    assert outputs.fault() is None
    return outputs.tensors[0]


def tactics_of(name: str, problem: md.MoEProblem, tokens: int) -> list[md.Tactic]:
    """All tactics of a backend for a token count, its default among them."""
    backend, bucket = get_backend(name), md.Bucket(max(tokens, 1), max(tokens, 1))
    found = dict.fromkeys(backend.tactics(problem, bucket, CPU, backend.config_type()))
    return list(found | {backend.default(problem, bucket, CPU): None})


def error_of(result: torch.Tensor | np.ndarray, truth: np.ndarray) -> float:
    """The largest error of a row, relative to the root mean square of the truth's rows."""
    if not truth.size:
        return 0.0
    rows = truth.reshape(len(truth), -1)
    scale = math.sqrt((rows**2).sum(1).mean()) or 1.0
    values = f64(result) if isinstance(result, torch.Tensor) else result
    return float(np.linalg.norm(values.reshape(rows.shape) - rows, axis=1).max()) / scale


def limit_of(case: Case, truth: np.ndarray, ep_rank: int = 0, tp_rank: int = 0) -> float:
    """Twice the error that rounding every step to the case's format makes."""
    dtype = case.problem.dtype
    return 2 * max(error_of(oracle(case, ep_rank, tp_rank, rounded_to=dtype), truth), EPS[dtype])
