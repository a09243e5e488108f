"""A second SGLang plugin, for tests alone: lets the engine run without a GPU, and counts what our runner core did.

Counts of a process go to `$MOE_DIST_TEST_COUNTS/<pid>`: the calls of our core, those of them that ask for rows or have fused shared
experts, and the calls of SGLang's own CPU experts.
With `$MOE_DIST_TEST_STEAL` set, the MoE layer of that number gets SGLang's Triton runner after all; with `$MOE_DIST_TEST_ROWS`, that
layer asks for a weighted row a slot (`no_combine`), and the model sums them; with `$MOE_DIST_TEST_FUSE`, GLM fuses its shared expert,
which SGLang does on a card alone.
"""

import os
from pathlib import Path

COUNTS = {"core": 0, "native": 0}


def register() -> None:
    import sglang.srt.layers.quantization.fp8 as fp8
    import sglang.srt.layers.rotary_embedding.base as rotary
    import sglang.srt.mem_cache.memory_pool as memory_pool
    import torch
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rotary._is_cpu = True  # else it looks for a CUDA kernel
    fp8.scaled_fp8_quant = _quantise  # CUDA's alone
    # What a draft model does at start, and needs a card for. No call of these tests needs what they would do.
    memory_pool.copy_all_layer_kv_cache_func = lambda *args: None
    torch.cuda.synchronize = lambda *args: None
    HookRegistry.register("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", _none, HookType.REPLACE)
    places = {
        "core": "moe_dist_sglang.runner.MoEDistRunnerCore.run_from_dispatch",
        "native": "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
    }
    for kind, place in places.items():
        HookRegistry.register(place, _counting(kind), HookType.AROUND)
    if "MOE_DIST_TEST_STEAL" in os.environ:
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", _steal, HookType.AFTER)
    if "MOE_DIST_TEST_ROWS" in os.environ:
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", _ask_for_rows, HookType.AROUND)
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward", _sum_rows, HookType.AFTER)
    if "MOE_DIST_TEST_FUSE" in os.environ:
        Glm4MoeForCausalLM.shared_experts_fusion_disable_reason = classmethod(_none)


def _quantise(weight, scale):
    import torch

    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _steal(result, layer, *args, **kwargs):
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    if layer.layer_id == int(os.environ["MOE_DIST_TEST_STEAL"]):
        layer.runner = layer.quant_method.runner = MoeRunner(MoeRunnerBackend.TRITON, layer.moe_runner_config)


def _ask_for_rows(original, layer, *args, **kwargs):
    rows = kwargs["layer_id"] == int(os.environ["MOE_DIST_TEST_ROWS"])
    original(layer, *args, **kwargs, **({"no_combine": True} if rows else {}))
    layer.moe_runner_config.no_combine_keep_router_weight = rows


def _sum_rows(result, layer, *args, **kwargs):
    return result.sum(1) if layer.moe_runner_config.no_combine else None


def _none(*args):
    return None


def _counting(kind):
    def call(original, *args, **kwargs):
        COUNTS[kind] += 1
        if kind == "core":
            config = args[3]
            for name, asked in (("rows", config.no_combine), ("shared", config.num_fused_shared_experts)):
                if asked:
                    COUNTS[name] = COUNTS.get(name, 0) + 1
        path = Path(os.environ["MOE_DIST_TEST_COUNTS"]) / str(os.getpid())
        path.write_text(" ".join(f"{name}={count}" for name, count in COUNTS.items()))
        return original(*args, **kwargs)

    return call
