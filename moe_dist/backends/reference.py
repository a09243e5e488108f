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
SLOTS_AT_ONCE = 4096  # bounds the fp32 rows of a large call


def compute(layer: BoundLayer, acts: MoEActivationPack, *, dtype: torch.dtype = torch.float32, quantise_rows: bool = False) -> torch.Tensor:
    """fp32 [T, H] (or [T, K, H] without finalize): what the layer means, with each product's result rounded to `dtype`.

    fp32 gives the truth. The config's own dtype, with `quantise_rows` (each row's activations rounded to fp8 as
    `QuantConfig` describes) where the weights are fp8, gives the error that a plain kernel of that format may have.
    """
    config, weights = layer.problem.config, layer.weights
    rows_TK, scores_TK = select(layer, acts)
    tokens, slots = rows_TK.shape
    device, hidden = acts.hidden_states.device, config.experts.hidden_size
    out = torch.zeros(tokens * slots, hidden, dtype=torch.float32, device=device)
    on_input = config.routing.weight_on_input
    group = config.quant.block_shape[1] if config.quant.block_shape else None

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    def operand(x: torch.Tensor) -> torch.Tensor:
        return _fp8_rounded(rounded(x), group) if quantise_rows else rounded(x)

    def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Each of `x`'s rows by its own expert's matrix."""
        results, known = [], -1
        for expert, row in zip(experts, x.unbind(), strict=True):
            if expert != known:
                matrix, known = dequantise(weight[expert], None if scale is None else scale[expert], config.quant), expert
            results.append(matrix @ row)
        y = torch.stack(results)
        return y if bias is None else y + bias[torch.tensor(experts, device=device)].float()

    # Local slots, those of an expert together. Products go row by row; what rounds each element by itself is done to many at once.
    order = sorted((expert, slot) for slot, expert in enumerate(rows_TK.flatten().tolist()) if expert >= 0)
    for start in range(0, len(order), SLOTS_AT_ONCE):
        experts = [expert for expert, _ in order[start : start + SLOTS_AT_ONCE]]
        places = torch.tensor([slot for _, slot in order[start : start + SLOTS_AT_ONCE]], device=device)
        x, score = acts.hidden_states[places // slots].float(), scores_TK.flatten()[places, None]
        h = product(operand(x * score if on_input else x), weights.w13, weights.w13_scale, weights.w13_bias)
        # A CPU's vector loops round a function's value differently by where it lies: alone, a row always gets the same bits.
        rows = torch.split(rounded(h), 1 if device.type == "cpu" else SLOTS_AT_ONCE)
        act = torch.cat([activate(part, config.activation) for part in rows])
        y = product(operand(act), weights.w2, weights.w2_scale, weights.w2_bias)
        out[places] = rounded(y) if on_input else rounded(y) * score
    out = out.view(tokens, slots, hidden)
    return out.sum(1) if config.execution.do_finalize else out


def _fp8_rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """Rows as fp8 holds them, one scale for each `group` columns of a row (None: for the row)."""
    columns = x.shape[-1]
    size = min(group or columns, columns)
    parts = F.pad(x, (0, -columns % size)).view(*x.shape[:-1], -1, size)
    scales = (parts.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return ((parts / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)[..., :columns]


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
