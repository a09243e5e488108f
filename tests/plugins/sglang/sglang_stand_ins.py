"""One MoE layer of SGLang's without an engine, in SGLang's own types: what the plugin reads of one, a call of it, and its result in plain words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import moe_dist as md

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 32, 16, 5
CPU = torch.device("cpu")


def settings_of(eplb: bool = False, deterministic: bool = False, compiled: bool = False) -> Any:
    return SimpleNamespace(
        moe=SimpleNamespace(enable_eplb=eplb),
        deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
        graph=SimpleNamespace(enable_torch_compile=compiled),
    )


def method_of(kind: str = "unquantised", **changes: Any) -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    if kind == "unquantised":
        return UnquantizedFusedMoEMethod()
    return Fp8MoEMethod(Fp8Config(**({"is_checkpoint_fp8_serialized": True, "weight_block_size": [16, 16]} | changes)))


def layer_of(ep_size: int = 1, ep_rank: int = 0, **changes: Any) -> Any:
    """A stand-in for `FusedMoE`: its attributes that the plugin reads, and its runner config. changes: of that config."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    local = EXPERTS // ep_size
    torch.manual_seed(0)
    w13, w2 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    held = slice(ep_rank * local, (ep_rank + 1) * local)
    fields = {
        "num_experts": EXPERTS, "num_local_experts": local, "hidden_size": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE,
        "layer_id": 3, "top_k": TOP_K, "num_fused_shared_experts": 0, "params_dtype": torch.float32, "inplace": False,
    }  # fmt: skip
    return SimpleNamespace(
        moe_runner_config=MoeRunnerConfig(**(fields | changes)),
        num_experts=EXPERTS,
        moe_ep_size=ep_size,
        moe_ep_rank=ep_rank,
        moe_tp_size=1,
        moe_tp_rank=0,
        with_bias=False,
        should_fuse_routed_scaling_factor_in_topk=False,
        w13_weight=torch.nn.Parameter(w13[held].clone(), requires_grad=False),
        w2_weight=torch.nn.Parameter(w2[held].clone(), requires_grad=False),
    )


def core_of(layer: Any) -> Any:
    from moe_dist_sglang.layers import layer_config, layer_weights, routed_scale
    from moe_dist_sglang.runner import MoEDistRunnerCore

    core, method = MoEDistRunnerCore(layer.moe_runner_config), method_of()
    core.bind(md.MoELayer(**layer_config(layer, method)), layer_weights(layer, method), routed_scale(layer))
    return core


def call(layer: Any, core: Any, x: torch.Tensor, topk_output: Any, method: Any = None) -> torch.Tensor:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    info = (method or method_of()).get_triton_quant_info(layer)
    result: torch.Tensor = core.run_from_dispatch(StandardDispatchOutput(x, None, topk_output), info, layer.moe_runner_config).hidden_states
    return result


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights and global ids; the second row has an empty slot, the last is padding, the third names an expert twice."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[0, 7], [3, -1], [5, 5], [4, 1], [-1, -1]], dtype=torch.int32)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, TOP_K, generator=generator) + 0.1, ids


def rows(layer: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What each slot's expert says, unweighted [T, K, H], in plain words; zeros for empty slots."""
    out = torch.zeros(*ids.shape, HIDDEN)
    for token in range(ids.shape[0]):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                gate, up = (layer.w13_weight[expert] @ x[token]).chunk(2)
                out[token, slot] = layer.w2_weight[expert] @ (torch.nn.functional.silu(gate) * up)
    return out


def standard(weights: torch.Tensor, ids: torch.Tensor) -> Any:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, weights)


def untuned(config: md.MoEConfig, native: Any) -> md.MoELayer:
    from moe_dist.serving import untuned_layer

    return untuned_layer(config, CPU, [native])
