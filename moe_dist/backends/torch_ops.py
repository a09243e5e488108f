"""What the torch backends share: the activation, dequantised weights, one expert's product, the weighted sum. No tactic lives here.

Only `reference.py` and the `torch_*.py` backends import this. Shapes: T tokens, K slots, R rows of one expert, E local
experts, H hidden, I local intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moe_dist.backends.base import TORCH_DTYPES, BoundLayer, MoEProblem
from moe_dist.config import ActivationConfig, QuantConfig

FINALIZE_TOKENS = 1024  # rows summed at once: bounds the fp32 copy of the slots to this many tokens


def activate(h: torch.Tensor, activation: ActivationConfig) -> torch.Tensor:
    """`ActivationConfig`'s formula in fp32: [..., 2I] (gate columns, then up) or [..., I] ungated -> fp32 [..., I]."""
    h = h.float()
    limit = activation.limit
    if not activation.gated:
        if limit is not None:
            h = h.clamp(-limit, limit)
        if activation.kind == "relu2":
            return h.relu().square()
        return F.silu(h) if activation.kind == "silu" else F.gelu(h, approximate="tanh")
    gate, up = h.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gated = gate * torch.sigmoid(activation.alpha * gate) if activation.kind == "swiglu" else F.gelu(gate, approximate="tanh")
    return gated * (up + activation.beta)


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None, quant: QuantConfig) -> torch.Tensor:
    """fp32 values of `weight` [..., rows, columns]; the last block of a row or column may be partial."""
    if scale is None:
        return weight.float()
    if quant.granularity == "tensor":
        return weight.float() * scale[..., None, None]
    if quant.granularity == "channel":
        return weight.float() * scale[..., None]
    assert quant.block_shape is not None
    rows, columns = weight.shape[-2:]
    spread = scale.repeat_interleave(quant.block_shape[0], -2)[..., :rows, :]
    return weight.float() * spread.repeat_interleave(quant.block_shape[1], -1)[..., :columns]


def expert_product(layer: BoundLayer, expert: int, compute: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [R, H] -> [R, H] by local expert `expert`, products in `compute`, biases added, not weighted. Dequantises now."""
    weights, config = layer.weights, layer.problem.config

    def pick(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return (weight[expert] if scale is None else dequantise(weight[expert], scale[expert], config.quant)).to(compute)

    def pick_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias[expert].to(compute)

    w13, w2 = pick(weights.w13, weights.w13_scale), pick(weights.w2, weights.w2_scale)
    bias13, bias2 = pick_bias(weights.w13_bias), pick_bias(weights.w2_bias)

    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(activate(F.linear(x.to(compute), w13, bias13), config.activation).to(compute), w2, bias2)

    return product


def finalize(y_TKH: torch.Tensor, rows_TK: torch.Tensor, weights_TK: torch.Tensor | None, out: torch.Tensor) -> None:
    """Weigh the slots in fp32 (None: they are weighted already), drop remote ones whatever they hold, and fill `out` ([T, H] or [T, K, H])."""
    for start in range(0, y_TKH.shape[0], FINALIZE_TOKENS):
        part = slice(start, start + FINALIZE_TOKENS)
        y = y_TKH[part].float().masked_fill((rows_TK[part] < 0)[..., None], 0.0)
        if weights_TK is not None:
            y = y * weights_TK[part, :, None]
        out[part] = y.sum(1) if out.dim() == 2 else y


def compute_dtypes(problem: MoEProblem, device: torch.device) -> tuple[str, ...]:
    """Formats that the products may run in, best guess first."""
    dtype = problem.config.quant.dtype
    if dtype == "bf16":
        # Without bf16 instructions a CPU emulates each product; casting the weights first then wins for many rows.
        return ("bf16", "fp32") if device.type == "cpu" else ("bf16",)
    return ("fp32",)  # fp16 too: an intermediate beyond 65504 must not become inf where the result fits


def torch_why_not(problem: MoEProblem, device: torch.device, name: str) -> str | None:
    """What no torch backend does."""
    config = problem.config
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"there is no device {device} in this process"
    if config.quant.weight not in (None, "fp8"):
        return f"{name} runs unquantised and fp8 weights, not {config.quant.weight}"
    if config.execution.batch_invariant:
        return f"{name}'s products choose their summation order by the number of rows, so batch_invariant can't be promised"
    return None


def element_size(name: str) -> int:
    """Bytes of one element of a format named as in `QuantConfig.dtype`."""
    return TORCH_DTYPES[name].itemsize
