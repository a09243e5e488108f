"""The truth: every product as one row times one matrix, in fp32, expert by expert. Slow, plain, and never a default.

`operation.py` and tests judge other backends by `compute`; the backend around it exists so that it can be asked for by name.
Shapes: T tokens, K slots, H hidden, I local intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.routing import select
from moe_dist.backends.torch_ops import activate, dequantise
from moe_dist.config import BackendConfig
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, Tactic

FP8_MAX = 448.0  # largest float8_e4m3fn


def compute(layer: BoundLayer, acts: MoEActivationPack, *, dtype: torch.dtype = torch.float32, quantise_rows: bool = False) -> torch.Tensor:
    """fp32 [T, H] (or [T, K, H] without finalize): what the layer means, with each product's result rounded to `dtype`.

    fp32 gives the truth. The config's own dtype, with `quantise_rows` (each row's activations rounded to fp8 as
    `QuantConfig` describes) where the weights are fp8, gives the error that a plain kernel of that format may have.
    """
    config, weights = layer.problem.config, layer.weights
    rows_TK, scores_TK = select(layer, acts)
    tokens, slots = rows_TK.shape
    out = torch.zeros(tokens, slots, config.experts.hidden_size, dtype=torch.float32, device=acts.hidden_states.device)
    bias13, bias2 = weights.w13_bias, weights.w2_bias
    on_input = config.routing.weight_on_input
    group = config.quant.block_shape[1] if config.quant.block_shape else None

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    def operand(x: torch.Tensor) -> torch.Tensor:
        return _fp8_rounded(rounded(x), group) if quantise_rows else rounded(x)

    places_of: dict[int, list[tuple[int, int]]] = {}
    for token, row in enumerate(rows_TK.tolist()):
        for slot, expert in enumerate(row):
            places_of.setdefault(expert, []).append((token, slot))
    for expert, places in sorted(places_of.items()):
        if expert < 0:
            continue
        w13 = dequantise(weights.w13[expert], None if weights.w13_scale is None else weights.w13_scale[expert], config.quant)
        w2 = dequantise(weights.w2[expert], None if weights.w2_scale is None else weights.w2_scale[expert], config.quant)
        for token, slot in places:
            x = acts.hidden_states[token].float()
            score = scores_TK[token, slot]
            h = w13 @ operand(x * score if on_input else x)
            if bias13 is not None:
                h = h + bias13[expert].float()
            y = w2 @ operand(activate(rounded(h), config.activation))
            if bias2 is not None:
                y = y + bias2[expert].float()
            out[token, slot] = rounded(y) if on_input else rounded(y) * score
    return out.sum(1) if config.execution.do_finalize else out


def _fp8_rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """A row as fp8 holds it, one scale for each `group` columns (None: for the row)."""
    size = min(group or len(x), len(x))
    parts = F.pad(x, (0, -len(x) % size)).view(-1, size)
    scales = (parts.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return ((parts / scales).to(torch.float8_e4m3fn).float() * scales).flatten()[: len(x)]


@dataclasses.dataclass(frozen=True)
class ReferenceConfig(BackendConfig):
    """The reference has no parameters."""

    name = "reference"


class ReferenceBackend(Backend):
    name = "reference"
    config_type = ReferenceConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        weight = problem.config.quant.weight
        return None if weight in (None, "fp8") else f"reference dequantises fp8 weights, not {weight}"

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        return (Tactic.of(self.name),)

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        return Tactic.of(self.name)

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
            out.copy_(compute(layer, acts))
            return tactic

        return run
