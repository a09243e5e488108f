"""The runner core: one call of SGLang's MoE layer carried out by a `MoELayer`. Knows no tuning and no start-up.

Shapes: T tokens, K slots, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
from sglang.srt.layers.dp_attention import is_allocation_symmetric
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import RegisteredMoeRunnerBackend
from sglang.srt.runtime_context import get_parallel

import moe_dist as md
from moe_dist.serving import mode_of
from moe_dist_sglang.compat import NAME
from moe_dist_sglang.native import SGLangBackend, routing

# SGLang's names of what a `MoEWeightPack` holds. Each can be replaced alone.
HELD = (
    ("w13_weight", "w13"), ("w2_weight", "w2"), ("w13_scale", "w13_scale"), ("w2_scale", "w2_scale"), ("b13", "w13_bias"), ("b2", "w2_bias"),
)  # fmt: skip


class MoEDistRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """Takes SGLang's standard dispatch with global expert ids, -1 for empty slots, and returns this rank's partial sum.

    The output is always a tensor of its own: `inplace` is permission, not a promise, to overwrite the input.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._layer: md.MoELayer | None = None
        self._weights: md.MoEWeightPack | None = None
        self._native: SGLangBackend | None = None
        self._scale = 1.0

    @property
    def runner_backend(self) -> RegisteredMoeRunnerBackend:
        return RegisteredMoeRunnerBackend(NAME)

    def bind(self, layer: md.MoELayer, weights: md.MoEWeightPack, scale: float, native: SGLangBackend | None = None) -> None:
        """scale: what multiplies the router's weights, see `layers.routed_scale`. native: SGLang's own experts of this layer, where a call
        that they serve needs nothing around it: on CUDA.
        """
        self._layer, self._weights, self._scale, self._native = layer, weights, scale, native

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> StandardCombineInput:
        layer, weights = self._layer, self._weights
        if layer is None or weights is None:
            raise RuntimeError(
                f"MoE layer {runner_config.layer_id} is called before moe_dist has bound its weights, at the end of load_model"
            )
        if any(_pointer(getattr(quant_info, theirs)) != _pointer(getattr(weights, ours)) for theirs, ours in HELD):
            raise RuntimeError(
                f"SGLang replaced the weights of MoE layer {runner_config.layer_id} after load_model; restart to serve new ones"
            )
        if dispatch_output.hidden_states_scale is not None or hooks is not None:
            raise RuntimeError(
                f"MoE layer {runner_config.layer_id} got quantised hidden states or LoRA hooks, which moe_dist refuses at start"
            )
        mode, tokens = mode_of(dispatch_output.hidden_states), dispatch_output.hidden_states.shape[0]
        if self._native is not None and tokens and layer.lookup(tokens, mode).backend == SGLangBackend.name:
            return self._native.serve(dispatch_output, quant_info, runner_config)
        x_TH = dispatch_output.hidden_states.contiguous()
        weights_TK, ids_TK = routing(dispatch_output.topk_output)
        # Before 0.5.23 no model of SGLang's asks for weighted rows.
        if runner_config.no_combine and not getattr(runner_config, "no_combine_keep_router_weight", False):
            weights_TK = torch.ones_like(weights_TK)
        elif self._scale != 1.0:
            weights_TK = weights_TK * self._scale
        if runner_config.no_combine:
            out = x_TH.new_empty(*ids_TK.shape, x_TH.shape[1])
        else:
            # The all-reduce that follows is fast where its input lies in symmetric memory: allocate nothing else here.
            with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
                out = torch.empty_like(x_TH)
        acts = md.MoEActivationPack(hidden_states=x_TH, topk_ids=ids_TK, topk_weights=weights_TK)
        layer((acts, weights), mode=mode, out=out)
        return StandardCombineInput(hidden_states=out)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
