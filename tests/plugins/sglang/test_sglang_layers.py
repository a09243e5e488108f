"""Which of SGLang's layers are served, as which config; what is refused, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_stand_ins import CPU, EXPERTS, TOP_K, layer_of, method_of, settings_of

import moe_dist as md

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("published")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top_k": None}, "how many experts a token takes"),
        ({"params_dtype": torch.float64}, "activations are torch.float64; moe_dist runs bf16, fp16, fp32"),
        ({"apply_router_weight_on_input": True}, "no one meaning for top-k 2"),
        ({"activation": "gelu"}, "activation 'gelu', gated, is not one"),  # exact, where ours is the tanh form
        ({"activation": "situ"}, "activation 'situ'"),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "interleaved"),
        ({"gemm1_clamp_limit": 7.0}, "clamps the gate after its sigmoid"),
        ({"activation": "gelu_tanh", "swiglu_limit": 10.0}, "'gelu_tanh' with swiglu_limit 10"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    from moe_dist_sglang.layers import layer_config

    with pytest.raises(md.UnsupportedBackend, match=reason):
        layer_config(layer_of(**changes), method_of())


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, md.ActivationConfig("swiglu")),
        ({"swiglu_limit": 10.0}, md.ActivationConfig("swiglu", limit=10.0)),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
            md.ActivationConfig("swiglu", alpha=1.702, beta=1.0, limit=7.0),
        ),
        ({"activation": "gelu_tanh"}, md.ActivationConfig("geglu")),
        ({"activation": "relu2", "is_gated": False}, md.ActivationConfig("relu2")),
        ({"activation": "silu", "is_gated": False}, md.ActivationConfig("silu")),
    ],
)
def test_activations_are_those_of_the_triton_runner(changes: dict[str, Any], activation: md.ActivationConfig) -> None:
    from moe_dist_sglang.layers import layer_config

    assert layer_config(layer_of(**changes), method_of()).activation == activation


def test_fused_shared_experts_are_counted_apart_and_stay_on_one_rank() -> None:
    from moe_dist_sglang.layers import layer_config

    routing = layer_config(layer_of(num_fused_shared_experts=1), method_of()).routing
    assert (routing.num_experts, routing.top_k, routing.num_fused_shared_experts) == (EXPERTS - 1, TOP_K - 1, 1)
    with pytest.raises(md.UnsupportedBackend, match="--disable-shared-experts-fusion"):
        layer_config(layer_of(ep_size=2, num_fused_shared_experts=1), method_of())


@pytest.mark.parametrize(
    ("changes", "quant"),
    [
        ({}, {"granularity": "block", "block_shape": (16, 16)}),
        ({"weight_block_size": None}, {"granularity": "tensor"}),
        ({"weight_block_size": None, "is_checkpoint_fp8_serialized": False}, {"granularity": "tensor"}),  # quantised while loading
    ],
)
def test_fp8_formats(changes: dict[str, Any], quant: dict[str, Any]) -> None:
    from moe_dist_sglang.layers import layer_config, why_not

    method = method_of("fp8", **changes)
    assert why_not(layer_of(), method) is None
    assert layer_config(layer_of(), method).quant == md.QuantConfig(dtype="fp32", weight="fp8", **quant)


def test_weights_that_are_not_served() -> None:
    from moe_dist_sglang.layers import why_not

    static = method_of("fp8", weight_block_size=None, activation_scheme="static")
    assert "static activation scales" in str(why_not(layer_of(), static))
    assert "mxfp8" in str(why_not(layer_of(), method_of("fp8", weight_block_size=None, use_mxfp8=True)))
    assert "of object; moe_dist serves UnquantizedFusedMoEMethod, Fp8MoEMethod" in str(why_not(layer_of(), object()))


@pytest.mark.parametrize(
    ("owner", "value", "reason"),
    [
        ("get_moe_a2a_backend", SimpleNamespace(is_none=lambda: False, value="deepep"), "--moe-a2a-backend deepep"),
        ("get_lora", SimpleNamespace(enable_lora=True, lora_paths=None), "LoRA"),
        ("get_lora", SimpleNamespace(enable_lora=None, lora_paths=["adapter"]), "LoRA"),  # paths alone turn it on
        ("get_exec", settings_of(eplb=True), "--enable-eplb"),
        ("get_exec", settings_of(compiled=True), "--enable-torch-compile"),
    ],
)
def test_engine_options_that_need_more_are_refused(monkeypatch: pytest.MonkeyPatch, owner: str, value: Any, reason: str) -> None:
    from moe_dist_sglang import layers

    monkeypatch.setattr(layers, owner, lambda: value)
    assert reason in str(layers.why_not(layer_of(), method_of()))


def test_deterministic_inference_is_a_demand_on_every_tactic(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_sglang import layers
    from moe_dist_sglang.native import SGLangBackend

    assert not layers.layer_config(layer_of(), method_of()).execution.batch_invariant
    monkeypatch.setattr(layers, "get_exec", lambda: settings_of(deterministic=True))
    layer, method = layer_of(), method_of()
    reasons = md.explain_backends(layers.layer_config(layer, method), CPU, extra_backends=[SGLangBackend(layer, method)])
    assert "equal bits" in str(reasons["sglang"])
    assert "batch_invariant" in str(reasons["torch_grouped"])


def test_weights_that_sglang_repacked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_sglang import layers

    layer, method = layer_of(), method_of()
    assert layers.layer_weights(layer, method).w13.data_ptr() == layer.w13_weight.data_ptr()  # as they lie: no copy
    method.w13_swiglu_interleaved = True
    with pytest.raises(md.UnsupportedBackend, match="unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"):
        layers.layer_weights(layer, method)
    monkeypatch.setattr(layers, "use_intel_amx_backend", lambda layer: True)
    with pytest.raises(md.UnsupportedBackend, match="AMX kernels; uninstall"):
        layers.layer_weights(layer, method_of())


def test_a_scale_on_the_sum_and_a_weight_on_the_input_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale would have to go through the activation. Where the model applies it to the result, nothing stands against it."""
    from moe_dist_sglang import layers

    changes = {"apply_router_weight_on_input": True, "top_k": 1, "routed_scaling_factor": 2.5}
    assert layers.layer_config(layer_of(**changes), method_of()).routing.weight_on_input
    monkeypatch.setattr(layers, "is_cuda", lambda: True)
    with pytest.raises(md.UnsupportedBackend, match=r"a routed scaling factor of 2\.5 can't go with the router's weight on the input"):
        layers.layer_config(layer_of(**changes), method_of())
