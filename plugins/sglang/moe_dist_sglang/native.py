"""SGLang's own experts as a backend: the pool's default, so that tuning can only win over what SGLang would have run.

On CUDA that is its Triton runner, elsewhere its plain torch loop, for unquantised weights. One instance belongs to one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.moe_runner.triton import fused_experts_none_to_triton
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutputChecker

import moe_dist as md


@dataclasses.dataclass(frozen=True)
class SGLangConfig(md.BackendConfig):
    """SGLang's own experts, without parameters."""

    name = "sglang"


class SGLangBackend(md.Backend):
    """`layer`: the `FusedMoE` whose loaded weights are those of every `BoundLayer` that it is bound to. `method`: its quantisation method."""

    name = "sglang"
    config_type = SGLangConfig

    def __init__(self, layer: Any, method: Any) -> None:
        self._layer, self._method = layer, method
        # Not scaled: the core has scaled the router's weights. In place, see `_triton`.
        self._config = dataclasses.replace(layer.moe_runner_config, inplace=True, routed_scaling_factor=None)
        self._expert_map: torch.Tensor | None = None

    def why_not(self, problem: md.MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
        config = problem.config
        if not config.execution.do_finalize or config.execution.batch_invariant or config.execution.deterministic:
            return "SGLang's experts are in the pool for summed results without a promise of equal bits"
        if device.type == "cuda":
            return None
        if config.quant.weight is not None:
            return f"SGLang's torch experts have no product for {config.quant.weight} weights"
        if config.routing.weight_on_input:
            return "SGLang's torch experts don't apply the router's weight to the input"
        if config.activation != md.ActivationConfig("swiglu"):  # of those that the loop has, the one that ours knows
            return f"SGLang's torch experts don't compute {config.activation}"
        return None

    def tactics(self, problem: md.MoEProblem, bucket: md.Bucket, device: torch.device, params: md.BackendConfig) -> Sequence[md.Tactic]:
        return [self.default(problem, bucket, device)]

    def default(self, problem: md.MoEProblem, bucket: md.Bucket | None, device: torch.device) -> md.Tactic:
        return md.Tactic.of(self.name, runner="triton" if device.type == "cuda" else "torch")

    def workspace(self, problem: md.MoEProblem, tactic: md.Tactic, num_tokens: int) -> md.Workspace:
        """The rows between its kernels, for each slot: gate and up, their product, the expert's result."""
        config = problem.config
        row = (2 if config.activation.gated else 1) * problem.local_intermediate + problem.local_intermediate + config.experts.hidden_size
        return md.Workspace(num_tokens * config.routing.slots * row * problem.dtype.itemsize)

    def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Callable[[md.MoEActivationPack, torch.Tensor], md.Tactic]:
        self._expert_map = layer.expert_map
        experts_of = self._triton if tactic["runner"] == "triton" else self._torch

        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> md.Tactic:
            assert acts.topk_ids is not None
            assert acts.topk_weights is not None
            experts_of(acts.hidden_states, acts.topk_weights, self._local(acts.topk_ids), out)
            return tactic

        return run

    def serve(self, dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        """A call as SGLang makes it where it serves alone, on CUDA: its own allocation, scaling and in-place output, and nothing around it."""
        topk = dispatch_output.topk_output
        if self._expert_map is not None or not TopKOutputChecker.format_is_standard(topk):
            weights, ids = routing(topk)
            dispatch_output = dispatch_output._replace(topk_output=StandardTopKOutput(weights, self._local(ids).int(), weights))
        return fused_experts_none_to_triton(dispatch_output, quant_info, runner_config)

    def _local(self, ids: torch.Tensor) -> torch.Tensor:
        """Global ids as this rank's rows, -1 for other ranks' experts and empty slots."""
        if self._expert_map is None:
            return ids
        return self._expert_map[ids.clamp_min(0).long()].masked_fill(ids < 0, -1)

    def _triton(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        # In place on a copy: an output of its own would be allocated in SGLang's symmetric pool, which is a collective. The copy is all
        # that tuning times of these experts and that a served call does without.
        out.copy_(x)
        dispatched = StandardDispatchOutput(out, None, StandardTopKOutput(weights, ids.int(), weights))
        fused_experts_none_to_triton(dispatched, self._method.get_triton_quant_info(self._layer), self._config)

    def _torch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        # The loop takes neither empty slots nor an expert twice in a row: each filled slot becomes a row of its own.
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        token, slot = (ids >= 0).nonzero(as_tuple=True)
        if token.numel():
            one = torch.ones(token.shape[0], 1, device=x.device)
            rows = moe_forward_native(self._layer, x[token], StandardTopKOutput(one, ids[token, slot][:, None], one), self._config)
            sums.index_add_(0, token, rows.float() * weights[token, slot][:, None])
        out.copy_(sums)


def routing(topk_output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32 [T, K], ids int32 or int64 [T, K]) of any format that can say them; TypeError: of Triton-kernels' sorted one."""
    if TopKOutputChecker.format_is_bypassed(topk_output):
        topk_output = topk_output.to_standard()
    if TopKOutputChecker.format_is_packed(topk_output):
        packed = topk_output.packed_topk_ids.contiguous()
        # One int32 a slot: the id above, the weight's bf16 bits below, which come first in memory.
        return packed.view(torch.bfloat16)[..., ::2].float(), packed >> 16
    if not TopKOutputChecker.format_is_standard(topk_output):
        raise TypeError(f"moe_dist takes router outputs with ids and weights, not {type(topk_output).__name__}")
    return topk_output.topk_weights.float().contiguous(), topk_output.topk_ids.contiguous()
