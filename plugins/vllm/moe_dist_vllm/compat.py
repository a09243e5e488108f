"""What this plugin needs of vLLM, and whether the vLLM at hand has it: read from its source files, so that nothing is imported.

The list below is complete: a symbol that `patch.py`, `experts.py`, `native.py` or `warmup.py` relies on stands here, with the parameters
that it must take. It is checked as a whole before anything is changed: an engine is patched entirely or not at all.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

TESTED = "0.26 to 0.33"


@dataclasses.dataclass(frozen=True)
class Need:
    """module: below `vllm.`. symbol: a name, or Class.name. parameters: those that a function must have, in this order."""

    module: str
    symbol: str
    parameters: tuple[str, ...] = ()


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
    found = []
    trees: dict[str, ast.Module | None] = {}
    for need in NEEDS:
        if need.module not in trees:
            path = root.joinpath(*need.module.split(".")).with_suffix(".py")
            trees[need.module] = ast.parse(path.read_text()) if path.is_file() else None
        tree, name = trees[need.module], f"vllm.{need.module}.{need.symbol}"
        if tree is None:
            found.append(f"{name}: there is no module vllm.{need.module}")
            continue
        node = _find(tree, need.symbol)
        if node is None:
            found.append(f"{name}: there is no such name")
        elif need.parameters and (taken := _parameters(node))[: len(need.parameters)] != need.parameters:
            found.append(f"{name}: it takes ({', '.join(taken)}), not ({', '.join(need.parameters)})")
    return found


def _find(tree: ast.Module, symbol: str) -> ast.stmt | None:
    body, node = tree.body, None
    for part in symbol.split("."):
        node = next((statement for statement in _flat(body) if part in _names(statement)), None)
        if node is None:
            return None
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body, and of its `if` and `try` branches."""
    flat = []
    for statement in body:
        flat.append(statement)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try)):
                flat += _flat(getattr(statement, field, []))
    return flat


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _parameters(node: ast.stmt) -> tuple[str, ...]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
