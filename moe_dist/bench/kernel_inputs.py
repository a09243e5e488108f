"""What the kernels' benchmark calls with, and what results and times are held against: shapes, inputs, fp32 truth, the card's floor.

Times nothing. `kernels.py`, cli, tests and the plugins' own comparisons import this. Shapes: T tokens, K slots, E experts, H hidden, I local
intermediate.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import cast

import torch

from moe_dist.backends.base import BoundLayer, MoEProblem
from moe_dist.backends.reference import compute
from moe_dist.config import BackendOptions, ExecutionConfig, ExpertConfig, MoEConfig, QuantConfig, RoutingConfig
from moe_dist.tensors import MoEActivationPack


@dataclasses.dataclass(frozen=True)
class Shape:
    """One rank's share of a published model's MoE layer. dtypes: those that it is timed in."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inter: int
    dtypes: tuple[str, ...] = ("bf16",)

    def problem(self, dtype: str, *, max_num_tokens: int, backends: BackendOptions | None = None) -> MoEProblem:
        return MoEProblem.of(self.config(dtype, max_num_tokens=max_num_tokens, backends=backends), routed=True)

    def config(self, dtype: str, *, max_num_tokens: int, backends: BackendOptions | None = None) -> MoEConfig:
        quant = QuantConfig(weight="fp8", granularity="block", block_shape=(128, 128)) if dtype == "fp8" else QuantConfig(dtype=dtype)
        return MoEConfig(
            routing=RoutingConfig(self.experts, self.top_k),
            experts=ExpertConfig(hidden_size=self.hidden, intermediate_size=self.inter),
            quant=quant,
            backends=backends,
            execution=ExecutionConfig(tune_max_num_tokens=max_num_tokens),
        )


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768, ("bf16", "fp8")),
    Shape("qwen3-235b-tp8", 128, 8, 4096, 192),
    Shape("mixtral-8x7b-tp2", 8, 2, 4096, 7168),
    Shape("qwen3-next-80b", 512, 10, 2048, 512, ("bf16", "fp8")),
    Shape("glm-4.5-air-tp4", 128, 8, 4096, 352),
    Shape("deepseek-v3-tp8", 256, 8, 7168, 256, ("fp8",)),
    Shape("deepseek-v3-ep8", 32, 8, 7168, 2048, ("fp8",)),
)
DTYPES = ("bf16", "fp8")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
MODES = ("cuda_graph", "eager")
EAGER_TOKENS = (1,)  # where the host is what a call pays for
ROUTINGS = ("uniform", "skewed", "single")

# What a floor divides by, read on the card: bytes a second of a streaming read, operations a second of cuBLAS on 8192^3.
CEILINGS = {"NVIDIA H200": {"read_bytes_s": 4.55e12, "bf16_flops": 679e12, "fp8_flops": 1243e12}}
TRUTH_ROWS = 24  # rows whose truth is computed


def _sampled_rows(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, tokens - 1, min(tokens, TRUTH_ROWS), device=device).round().long()


def truth_of(layer: BoundLayer, acts: MoEActivationPack) -> torch.Tensor:
    """fp32 results of up to TRUTH_ROWS rows."""
    rows = _sampled_rows(len(acts.hidden_states), acts.hidden_states.device)
    assert acts.topk_ids is not None
    assert acts.topk_weights is not None
    return compute(
        layer,
        MoEActivationPack(hidden_states=acts.hidden_states[rows], topk_ids=acts.topk_ids[rows], topk_weights=acts.topk_weights[rows]),
    )


def error_of(out: torch.Tensor, truth: torch.Tensor) -> float:
    """||out - truth|| / ||truth|| over the rows of `truth_of`."""
    got = out[_sampled_rows(len(out), out.device)].float()
    return float(f"{float((got - truth).norm() / truth.norm()):.4g}")


def copies_of(tokens: int) -> int:
    """Input sets that a graph goes through: many where a call reads little, so that nothing of one is left in L2 for the next."""
    return 16 if tokens <= 4 else 8 if tokens <= 64 else 4 if tokens <= 1024 else 2


def draw_inputs(problem: MoEProblem, tokens: int, routing: str, seed: int, device: torch.device) -> MoEActivationPack:
    """A routed call's random inputs. routing: "uniform"; "skewed": experts as popular as 1, 1/2, 1/3 ...; "single": all tokens choose the same K."""
    config = problem.config
    experts, slots = config.routing.num_experts, config.routing.top_k
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + tokens)
    popularity = torch.zeros(experts, device=device)
    if routing == "skewed":
        popularity -= (torch.randperm(experts, generator=generator, device=device) + 1.0).log()
    noise = -torch.rand(1 if routing == "single" else tokens, experts, generator=generator, device=device).clamp_min(1e-12).log()
    ids = (popularity - noise.clamp_min(1e-12).log()).topk(slots, dim=1).indices.expand(tokens, -1)
    weights = torch.rand(tokens, slots, generator=generator, device=device) + 0.1
    return MoEActivationPack(
        hidden_states=torch.randn(tokens, config.experts.hidden_size, generator=generator, device=device).to(problem.dtype),
        topk_ids=ids.int().contiguous(),
        topk_weights=weights / weights.sum(1, keepdim=True),
    )


def spread_experts(inputs: Sequence[MoEActivationPack], experts: int) -> None:
    """Deal the experts out to calls of one token, so that none comes back before all others were read: their weights would nearly fit in L2."""
    dealt = torch.cat([torch.randperm(experts, generator=torch.Generator().manual_seed(seed)) for seed in range(len(inputs))])
    for at, acts in enumerate(inputs):
        assert acts.topk_ids is not None
        slots = acts.topk_ids.shape[1]
        chosen = dealt[at * slots : (at + 1) * slots]
        if len(set(chosen.tolist())) == slots:  # where two deals meet an expert may come twice: such a call keeps its draw
            acts.topk_ids.copy_(chosen)


def floor_us(shape: Shape, dtype: str, inputs: Sequence[MoEActivationPack], device: torch.device) -> float | None:
    """The larger of bytes (experts hit, hidden states in and out) over the card's read rate and operations over cuBLAS's. None: another card."""
    if device.type != "cuda" or (found := CEILINGS.get(torch.cuda.get_device_name(device))) is None:
        return None
    tokens, size = len(inputs[0].hidden_states), 1 if dtype == "fp8" else 2
    hit = statistics.mean(len(set(cast(torch.Tensor, acts.topk_ids).flatten().tolist())) for acts in inputs)
    weights = 3 * shape.hidden * shape.inter
    read_s = (hit * weights * size + tokens * shape.hidden * 4) / found["read_bytes_s"]
    return round(max(read_s, 2 * tokens * shape.top_k * weights / found[f"{dtype}_flops"]) * 1e6, 3)
