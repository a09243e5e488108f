"""A layer as vLLM's methods describe it to its choice of experts: 8 experts, top-2, hidden 128, intermediate 64, asked to be ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def layer(*, parallel: dict[str, Any] | None = None, **changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    alone = FusedMoEParallelConfig.make_no_parallel()
    fields: dict[str, Any] = {
        "num_experts": 8, "experts_per_token": 2, "hidden_dim": 128, "intermediate_size": 64, "num_local_experts": 8, "num_logical_experts": 8,
        "activation": MoEActivation.SILU, "device": torch.device("cpu"), "routing_method": RoutingMethodType.Default, "in_dtype": torch.bfloat16,
        "moe_parallel_config": dataclasses.replace(alone, **(parallel or {})), "moe_backend": "moe_dist",
    }  # fmt: skip
    return FusedMoEConfig(**(fields | changes))


def stand_in() -> Any:
    """A base for experts that stand for vLLM's own: they take what they are offered, and no workspace."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class StandIn(mk.FusedMoEExpertsModular):  # type: ignore[misc]
        expects_unquantized_inputs = True
        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = staticmethod(lambda *args: True)
        _supports_activation = _supports_parallel_config = staticmethod(lambda *args: True)
        activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)
        finalize_weight_and_reduce_impl = staticmethod(TopKWeightAndReduceNoOP)
        workspace_shapes = staticmethod(lambda M, N, K, *rest: ((0,), (0,), (M, K)))

    return StandIn
