"""What this plugin needs of vLLM. Imports no vLLM: `moe_dist.interop.source` reads its source files.

The list below is complete: a symbol that `patch.py`, `experts.py`, `native.py` or `warmup.py` relies on stands here, with the parameters
that it must take. It is checked as a whole before anything is changed: an engine is patched entirely or not at all.
"""

from __future__ import annotations

from pathlib import Path

from moe_dist.interop import source
from moe_dist.interop.source import Need

TESTED = "0.26 to 0.33"
FUSED_MOE = "model_executor.layers.fused_moe"
NEEDS = (
    Need("config.kernel", "MoEBackend"),
    Need("config.kernel", "KernelConfig.moe_backend"),
    Need("config.speculative", "SpeculativeConfig"),
    Need("config.vllm", "VllmConfig.additional_config"),
    Need("engine.arg_utils", "_compute_kwargs", ("cls",)),
    Need("engine.arg_utils", "NEEDS_HELP"),
    Need(f"{FUSED_MOE}.oracle.unquantized", "map_unquantized_backend", ("runner_backend",)),
    Need(f"{FUSED_MOE}.oracle.unquantized", "backend_to_kernel_cls", ("backend",)),
    Need(f"{FUSED_MOE}.oracle.unquantized", "select_unquantized_moe_backend", ("moe_config",)),
    Need(f"{FUSED_MOE}.oracle.unquantized", "UnquantizedMoeBackend.TRITON"),
    Need(f"{FUSED_MOE}.oracle.fp8", "map_fp8_backend", ("runner_backend",)),
    Need(f"{FUSED_MOE}.oracle.fp8", "backend_to_kernel_cls", ("backend",)),
    Need(f"{FUSED_MOE}.oracle.fp8", "select_fp8_moe_backend", ("config", "weight_key", "activation_key")),
    Need(f"{FUSED_MOE}.oracle.fp8", "Fp8MoeBackend.TRITON"),
    Need(f"{FUSED_MOE}.activation", "MoEActivation.SILU"),
    Need(f"{FUSED_MOE}.config", "FusedMoEConfig.moe_backend"),
    Need(f"{FUSED_MOE}.config", "FusedMoEConfig.moe_parallel_config"),
    Need(f"{FUSED_MOE}.config", "FusedMoEParallelConfig.all2all_backend"),
    Need(f"{FUSED_MOE}.config", "FusedMoEParallelConfig.enable_eplb"),
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
    Need("model_executor.layers.quantization.utils.fp8_utils", "prepare_fp8_moe_layer_for_deepgemm", ("w13", "w2", "w13_scale", "w2_scale")),
    Need("utils.deep_gemm", "is_deep_gemm_e8m0_used"),
    Need("utils.deep_gemm", "is_deep_gemm_supported"),
    Need("distributed.parallel_state", "get_tp_group"),
    Need("distributed.parallel_state", "_EP"),
    Need("envs", "VLLM_ENGINE_READY_TIMEOUT_S"),
    Need("v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ("self",)),
    Need("v1.worker.gpu_worker", "Worker.determine_available_memory", ("self",)),
    Need("v1.worker.gpu_model_runner", "GPUModelRunner.profile_run", ("self",)),
    Need("v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", ("self",)),
)  # fmt: skip


def problems(root: Path) -> list[str]:
    """What the vLLM whose package lies in `root` lacks, one line a symbol; empty: it fits."""
    return source.problems(root, NEEDS, "vllm")
