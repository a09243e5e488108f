"""From one of SGLang's MoE layers to a config and a weight pack, or the reason why it can't be served.

Owns what moe_dist serves of SGLang. Reads layers and SGLang's settings, changes neither. `runner.py` and `serve.py` import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_exec, get_lora
from sglang.srt.utils import is_cuda, use_intel_amx_backend

import moe_dist as md
from moe_dist.serving import DTYPES
from moe_dist_sglang.compat import NAME

METHODS = (UnquantizedFusedMoEMethod, Fp8MoEMethod)


def unserved(reason: str, reasons: Mapping[str, str | None] | None = None) -> md.UnsupportedBackend:
    """The error that ends start-up with `reason`, and each backend's own where none can run the layer."""
    return md.UnsupportedBackend(NAME, reason, reasons)


def why_not(layer: Any, method: Any) -> str | None:
    """Why moe_dist can't serve `layer` of quantisation method `method` in this engine; None: it can, as far as SGLang's options go."""
    a2a = get_moe_a2a_backend()
    if not a2a.is_none():
        return f"--moe-a2a-backend {a2a.value} brings its own token layout; moe_dist takes SGLang's standard one: leave the option away"
    if get_lora().enable_lora or get_lora().lora_paths:
        return "LoRA needs hooks between the two products, which moe_dist doesn't have; serve the merged model"
    if get_exec().moe.enable_eplb:
        return "--enable-eplb rewrites expert weights while serving, and layouts that moe_dist made of them would go stale; leave it away"
    if get_exec().graph.enable_torch_compile:
        return "--enable-torch-compile would trace through moe_dist's choice of a tactic; leave it away"
    if not isinstance(method, METHODS):
        served = ", ".join(kind.__name__ for kind in METHODS)
        return f"its weights are of {type(method).__name__}; moe_dist serves {served}"
    if isinstance(method, Fp8MoEMethod):
        return _why_not_fp8(method)
    return None


def _why_not_fp8(method: Any) -> str | None:
    if method.use_mxfp8 or method.is_fp4_expert:
        return f"its weights are {'mxfp8' if method.use_mxfp8 else 'fp4'}; moe_dist serves fp8 with fp32 scales here"
    if method.quant_config.activation_scheme == "static":
        return "the checkpoint brings static activation scales; moe_dist quantises activations as they come"
    return None


def layer_config(layer: Any, method: Any) -> md.MoEConfig:
    """The config of `layer`. UnsupportedBackend: `why_not`, or the model asks for what moe_dist doesn't compute. ConfigError: sizes don't fit."""
    if (reason := why_not(layer, method)) is not None:
        raise unserved(reason)
    runner = layer.moe_runner_config
    if runner.top_k is None:
        raise unserved("the model doesn't tell its layer how many experts a token takes")
    shared = runner.num_fused_shared_experts or 0
    if shared and layer.moe_ep_size > 1:
        raise unserved(
            f"{shared} shared experts are fused with the routed ones under expert parallelism; add --disable-shared-experts-fusion"
        )
    if runner.params_dtype not in DTYPES:
        raise unserved(f"its activations are {runner.params_dtype}; moe_dist runs {', '.join(DTYPES.values())}")
    if runner.apply_router_weight_on_input and runner.top_k != 1:
        raise unserved(f"the router's weight on the input has no one meaning for top-k {runner.top_k}; moe_dist does it for top-k 1")
    if runner.apply_router_weight_on_input and routed_scale(layer) != 1.0:
        raise unserved(f"a routed scaling factor of {routed_scale(layer):g} can't go with the router's weight on the input")
    return md.MoEConfig(
        routing=md.RoutingConfig(
            runner.num_experts - shared,
            runner.top_k - shared,
            num_fused_shared_experts=shared,
            weight_on_input=runner.apply_router_weight_on_input,
        ),
        experts=md.ExpertConfig(
            hidden_size=runner.hidden_size,
            intermediate_size=runner.intermediate_size_per_partition * layer.moe_tp_size,
            bias=bool(layer.with_bias),
        ),
        quant=_quant(method, DTYPES[runner.params_dtype]),
        activation=_activation(runner),
        parallel=md.ParallelConfig(tp_size=layer.moe_tp_size, ep_size=layer.moe_ep_size),
        execution=md.ExecutionConfig(
            do_finalize=not runner.no_combine, batch_invariant=bool(get_exec().deterministic.enable_deterministic_inference)
        ),
    )


def _quant(method: Any, dtype: str) -> md.QuantConfig:
    """A block has a scale, or else an expert's matrix has one: also where SGLang quantises while it loads."""
    if not isinstance(method, Fp8MoEMethod):
        return md.QuantConfig(dtype=dtype)
    if method.block_quant:
        return md.QuantConfig(dtype=dtype, weight="fp8", granularity="block", block_shape=tuple(method.weight_block_size))
    return md.QuantConfig(dtype=dtype, weight="fp8", granularity="tensor")


def _activation(runner: Any) -> md.ActivationConfig:
    """What SGLang's Triton runner computes between the products, which is what its models are written for."""
    alpha, beta, limit, clamp = runner.gemm1_alpha, runner.gemm1_beta, runner.gemm1_clamp_limit, runner.swiglu_limit
    modified = {"gemm1_alpha": alpha, "gemm1_beta": beta, "gemm1_clamp_limit": limit, "swiglu_limit": clamp}
    given = ", ".join(f"{name} {value:g}" for name, value in modified.items() if value is not None)
    kind = (runner.activation, bool(runner.is_gated))
    if kind == ("silu", True):
        if alpha is not None:
            if runner.gate_up_interleaved:
                raise unserved(f"gate and up rows of w13 are interleaved ({given}); moe_dist takes gate rows, then up rows")
            if beta not in (None, 1.0) or clamp is not None:
                raise unserved(f"an activation with {given} is not one that moe_dist knows")
            return md.ActivationConfig("swiglu", limit=limit, alpha=alpha, beta=1.0)
        if limit is not None or beta is not None:
            raise unserved(f"SGLang clamps the gate after its sigmoid here ({given}); moe_dist clamps before it")
        return md.ActivationConfig("swiglu", limit=clamp)
    if given:
        raise unserved(f"an activation {runner.activation!r} with {given} is not one that moe_dist knows")
    if kind == ("gelu_tanh", True):
        return md.ActivationConfig("geglu")
    if kind in (("relu2", False), ("silu", False)):
        return md.ActivationConfig(runner.activation)
    raise unserved(f"activation {runner.activation!r}, {'gated' if runner.is_gated else 'not gated'}, is not one that moe_dist knows")


def layer_weights(layer: Any, method: Any) -> md.MoEWeightPack:
    """The loaded weights of `layer` as they lie. UnsupportedBackend: SGLang repacked them for a kernel of its own."""
    if use_intel_amx_backend(layer):
        raise unserved("SGLang packed the weights for its AMX kernels; uninstall its CPU kernel package to serve with moe_dist")
    if getattr(method, "w13_swiglu_interleaved", False):
        raise unserved("SGLang interleaved w13's gate and up rows; unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED")
    info = method.get_triton_quant_info(layer)
    return md.MoEWeightPack(
        w13=info.w13_weight.data,
        w2=info.w2_weight.data,
        w13_bias=_data(info.b13),
        w2_bias=_data(info.b2),
        w13_scale=_data(info.w13_scale),
        w2_scale=_data(info.w2_scale),
        ep_rank=layer.moe_ep_rank,
        tp_rank=layer.moe_tp_rank,
    )


def _data(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.data


def routed_scale(layer: Any) -> float:
    """What the runner itself multiplies the routed sum by, as SGLang's Triton runner does.

    1 without a sum, where the router's weights carry the factor already, and off CUDA, where SGLang's models apply it to the result.
    """
    runner = layer.moe_runner_config
    if runner.no_combine or layer.should_fuse_routed_scaling_factor_in_topk or not is_cuda():
        return 1.0
    return float(runner.routed_scaling_factor or 1.0)
