"""What this plugin needs of SGLang. Imports no SGLang: `moe_dist.interop.source` reads its source files.

The list is complete: a symbol that a module of this plugin relies on stands here, with the parameters that it must take. It is
checked as a whole before a hook or the choice is registered: SGLang only logs a hook that it can't apply, and would run its own experts.
"""

from __future__ import annotations

from moe_dist.framework import NAME, Framework
from moe_dist.interop.source import Need, members

MOE = "srt.layers.moe"
UNQUANTISED = "srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
FP8 = "srt.layers.quantization.fp8.Fp8MoEMethod"


def _method(name: str) -> tuple[Need, ...]:
    module, _, owner = name.rpartition(".")
    return (
        Need(module, f"{owner}.create_moe_runner", ("self", "layer", "moe_runner_config")),
        Need(module, f"{owner}.apply", ("self", "layer", "dispatch_output")),
        Need(module, f"{owner}.get_triton_quant_info", ("self", "layer")),
    )


NEEDS = (
    # hooks.py
    Need("srt.plugins.hook_registry", "HookRegistry.register"),
    Need("srt.plugins.hook_registry", "HookType.AROUND"),
    Need("srt.arg_groups.choices", "add_moe_runner_backend_choices"),
    Need(f"{MOE}.moe_runner.runner", "register_moe_runner_core", ("backend_name", "factory")),
    Need(f"{MOE}.moe_runner.runner", "MoeRunner.__init__", ("self", "runner_backend", "config")),
    Need(f"{MOE}.moe_runner.runner", "MoeRunner.run", ("self", "dispatch_output", "quant_info")),
    Need(f"{MOE}.utils", "MoeRunnerBackend.AUTO"),
    Need(f"{MOE}.utils", "get_moe_runner_backend"),
    Need(f"{MOE}.utils", "resolve_moe_runner_backend"),
    *_method(UNQUANTISED),
    *_method(FP8),
    Need(f"{MOE}.token_dispatcher.standard", "StandardDispatcher.__init__", ("self", "moe_runner_config")),
    Need(f"{MOE}.token_dispatcher.standard", "StandardDispatcher.skip_local_expert_mapping"),
    Need("srt.model_executor.model_runner", "ModelRunner.load_model", ("self",)),
    Need("srt.model_executor.runner.base_runner", "BaseRunner.warmup", ("self",)),
    Need("srt.runtime_context", "get_flags"),
    Need("srt.runtime_context", "MoeFlags.runner_backend"),
    # layers.py
    Need(f"{MOE}.utils", "get_moe_a2a_backend"),
    Need("srt.runtime_context", "get_exec"),
    Need("srt.runtime_context", "get_lora"),
    Need("srt.utils.common", "is_cuda"),
    Need("srt.utils.common", "use_intel_amx_backend", ("layer",)),
    *members(
        f"{MOE}.fused_moe_triton.layer", "FusedMoE", "layer_name", "moe_runner_config", "num_experts", "moe_ep_size", "moe_ep_rank", "moe_tp_size",
        "moe_tp_rank", "with_bias", "should_fuse_routed_scaling_factor_in_topk",
    ),
    *members(
        "srt.layers.quantization.fp8", "Fp8MoEMethod", "quant_config", "block_quant", "weight_block_size", "use_mxfp8", "is_fp4_expert"
    ),
    Need("srt.layers.quantization.fp8", "Fp8Config.activation_scheme"),
    Need("srt.layers.quantization.unquant", "UnquantizedFusedMoEMethod.w13_swiglu_interleaved"),
    *members(
        f"{MOE}.moe_runner.base", "MoeRunnerConfig", "num_experts", "top_k", "num_fused_shared_experts", "params_dtype", "hidden_size",
        "intermediate_size_per_partition", "activation", "is_gated", "apply_router_weight_on_input", "no_combine",
        "inplace", "routed_scaling_factor", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit",
        "swiglu_limit", "gate_up_interleaved",
    ),
    *members(
        f"{MOE}.moe_runner.triton", "TritonMoeQuantInfo", "w13_weight", "w2_weight", "b13", "b2", "w13_scale", "w2_scale",
    ),
    # native.py
    Need(f"{MOE}.fused_moe_native", "moe_forward_native", ("layer", "x", "topk_output", "moe_runner_config")),
    Need(f"{MOE}.moe_runner.triton", "fused_experts_none_to_triton", ("dispatch_output", "quant_info", "runner_config")),
    *members(f"{MOE}.token_dispatcher.standard", "StandardDispatchOutput", "hidden_states", "hidden_states_scale", "topk_output"),
    *members(f"{MOE}.topk", "StandardTopKOutput", "topk_weights", "topk_ids", "router_logits"),
    # runner.py
    Need("srt.distributed.device_communicators.pynccl_allocator", "use_symmetric_memory", ("group_coordinator", "disabled")),
    Need("srt.layers.dp_attention", "is_allocation_symmetric"),
    Need(f"{MOE}.moe_runner.base", "DispatchMoeRunnerCore.run_from_dispatch", ("self", "dispatch_output", "quant_info", "runner_config")),
    *members(f"{MOE}.token_dispatcher.standard", "StandardCombineInput", "hidden_states"),
    *members(f"{MOE}.topk", "TopKOutputChecker", "format_is_standard", "format_is_packed", "format_is_bypassed"),
    Need(f"{MOE}.topk", "BypassedTopKOutput.to_standard", ("self",)),
    Need(f"{MOE}.topk", "PackedTopKOutput.packed_topk_ids"),
    Need(f"{MOE}.utils", "RegisteredMoeRunnerBackend"),
    Need("srt.runtime_context", "get_parallel"),
    # serve.py
    *members(f"{MOE}.fused_moe_triton.layer", "FusedMoE", "quant_method", "runner", "forward"),
    Need(f"{MOE}.topk", "TopK"),
    *members(
        "srt.model_executor.model_runner", "ModelRunner", "model", "device", "forward_stream", "max_running_requests", "server_args",
        "is_draft_worker", "draft_model_idx", "model_config",
    ),
    *members("srt.configs.model_config", "ModelConfig", "hf_text_config"),
    Need("srt.model_executor.runner.base_cuda_graph_runner", "get_batch_sizes_to_capture", ("model_runner", "captured_req_width")),
    Need("srt.model_executor.model_runner", "ModelRunner.decode_num_tokens_per_req", ("self",)),
    Need("srt.runtime_context", "get_schedule"),
)  # fmt: skip

SGLANG = Framework(
    package="sglang",
    title="SGLang",
    distributions=("sglang",),
    group="sglang.srt.plugins",
    allow="SGLANG_PLUGINS",
    empty_allows=True,
    needs=NEEDS,
    tested="0.5.20 to 0.5.23",
    patched="the names of --moe-runner-backend; the runners of unquantised and fp8 layers; load_model, which binds; the warm-up, which tunes first",
    refused="mxfp8 and 4-bit weights, --moe-a2a-backend, LoRA, EPLB, --enable-torch-compile",
)

__all__ = ["NAME", "NEEDS", "SGLANG"]
