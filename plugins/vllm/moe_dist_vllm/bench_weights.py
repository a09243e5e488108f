"""The weights of a benchmarked model, drawn from each parameter's name, so that two engines hold the same ones.

vLLM's own dummy weights are so small that fp8 rounds them all to zero. Needs experts in the checkpoint's layout, which Triton's and ours are.
"""

from __future__ import annotations

import math
import zlib

import torch


@torch.no_grad()
def draw_weights(model: torch.nn.Module, dequantised: bool = False) -> None:
    """Weights as a trained model's might be, from each parameter's name: deviation of the fan-in, norms about one, fp8 well filled.

    dequantised: experts get what the fp8 model's numbers mean."""
    for name, parameter in model.named_parameters():
        value = parameter.data
        if "norm" in name:
            value.copy_(1 + 0.1 * torch.randn(value.shape, generator=_seeded(name, value.device), device=value.device))
        elif value.ndim == 3 and "scale" not in name and (dequantised or value.dtype == torch.float8_e4m3fn):
            scales = (
                _draw_scales(f"{name}_scale_inv", (value.shape[0], value.shape[1] // 128, value.shape[2] // 128), value.device)
                if dequantised
                else None
            )
            generator = _seeded(name, value.device)
            for expert in range(value.shape[0]):
                drawn = 100 * torch.randn(value.shape[1:], generator=generator, device=value.device)
                stored = drawn.clamp_(-448, 448).to(torch.float8_e4m3fn)
                if scales is None:
                    value[expert].copy_(stored)
                else:
                    value[expert].copy_(stored.float() * scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1))
        elif "scale" in name:
            value.copy_(_draw_scales(name, tuple(value.shape), value.device))
        elif value.ndim > 1:
            value.normal_(0, 0.5 if "embed" in name else value.shape[-1] ** -0.5, generator=_seeded(name, value.device))
        if name.endswith("lm_head.weight"):
            value.mul_(4)  # logits apart by more than rounding moves them


def _seeded(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def _draw_scales(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Block scales [E, row blocks, column blocks], by which fp8 values of deviation 100 become those of the fan-in."""
    drawn: torch.Tensor = 0.5 + torch.rand(shape, generator=_seeded(name, device), device=device)
    return drawn * (0.01 / math.sqrt(128 * shape[2]))
