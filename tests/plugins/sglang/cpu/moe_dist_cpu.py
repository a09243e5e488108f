"""A second SGLang plugin, for tests alone: lets the engine run without a GPU, and counts what our runner core did. With a GPU it only counts.

Counts of a process go to `$MOE_DIST_TEST_COUNTS/<pid>`: the calls of our core, those of them that ask for rows, have fused shared
experts or get a packed or bypassed router output, and the calls of SGLang's own CPU experts.
With `$MOE_DIST_TEST_STEAL` set, the MoE layer of that number gets SGLang's Triton runner after all; with `$MOE_DIST_TEST_ROWS`, that
layer asks for a weighted row a slot (`no_combine`), and the model sums them. What SGLang does on a card alone, a variable each:
`$MOE_DIST_TEST_FUSE`, DeepSeek fuses its shared expert, and `$MOE_DIST_TEST_SCALE`, leaves the routed scaling factor to the runner;
`$MOE_DIST_TEST_TOPK`, routers answer packed or bypassed, as they do for some runners of SGLang's.
"""

import os
from pathlib import Path

COUNTS = {"core": 0, "native": 0}


def register() -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    places = {
        "core": "moe_dist_sglang.runner.MoEDistRunnerCore.run_from_dispatch",
        "native": "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
    }
    for kind, place in places.items():
        HookRegistry.register(place, _counting(kind), HookType.AROUND)
    if not torch.cuda.is_available():
        _go_without_a_card()


def _go_without_a_card() -> None:
    import sglang.srt.layers.quantization.fp8 as fp8
    import sglang.srt.layers.rotary_embedding.base as rotary
    import sglang.srt.mem_cache.memory_pool as memory_pool
    import torch
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rotary._is_cpu = True  # else it looks for a CUDA kernel
    fp8.scaled_fp8_quant = _quantise  # CUDA's alone
    # Else DeepSeek's prompts go by a way that the torch backend has no attention for. The one of its decoding serves them too.
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    # What a draft model does at start, and needs a card for. No call of these tests needs what they would do.
    memory_pool.copy_all_layer_kv_cache_func = lambda *args: None
    torch.cuda.synchronize = lambda *args: None
    HookRegistry.register("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", _none, HookType.REPLACE)
    if "MOE_DIST_TEST_STEAL" in os.environ:
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", _steal, HookType.AFTER)
    if "MOE_DIST_TEST_ROWS" in os.environ:
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", _ask_for_rows, HookType.AROUND)
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward", _sum_rows, HookType.AFTER)
    if "MOE_DIST_TEST_FUSE" in os.environ:
        deepseek_v2.DeepseekV2ForCausalLM.shared_experts_fusion_disable_reason = classmethod(_none)
    if "MOE_DIST_TEST_SCALE" in os.environ:
        from moe_dist_sglang import layers

        deepseek_v2._is_xpu, layers.is_cuda = True, lambda: True  # each side's question who scales, and no other
    if "MOE_DIST_TEST_TOPK" in os.environ:
        hook = {"packed": _packed, "bypassed": _bypassed}[os.environ["MOE_DIST_TEST_TOPK"]]
        HookRegistry.register("sglang.srt.layers.moe.topk.TopK.forward_native", hook, HookType.AROUND)


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


def _bypassed(original, topk, *args, **kwargs):
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    topk.topk_config.output_format, topk.topk_config.torch_native = TopKOutputFormat.BYPASSED, True
    return topk.forward_cuda(*args, **kwargs)


def _packed(original, topk, *args, **kwargs):
    from sglang.srt.layers.moe.topk import PackedTopKOutput

    weights, ids, logits = original(topk, *args, **kwargs)
    return PackedTopKOutput(packer()(ids, weights), logits)


def packer():
    """SGLang's own, whose kernel Triton interprets."""
    try:
        from sglang.kernels.ops.lora.moe.trtllm_lora_temp import topk_pack
    except ImportError:  # before 0.5.22
        from sglang.kernels.ops.moe.trtllm_lora_temp import topk_pack
    from triton.runtime.interpreter import InterpretedFunction

    topk_pack._pack_topk_kernel = InterpretedFunction(topk_pack._pack_topk_kernel.fn)
    return topk_pack.fused_pack_topk


def _none(*args):
    return None


def _counting(kind):
    def call(original, *args, **kwargs):
        COUNTS[kind] += 1
        if kind == "core":
            config, form = args[3], args[1].topk_output.format.name.lower()
            for name, asked in (("rows", config.no_combine), ("shared", config.num_fused_shared_experts), (form, form != "standard")):
                if asked:
                    COUNTS[name] = COUNTS.get(name, 0) + 1
        path = Path(os.environ["MOE_DIST_TEST_COUNTS"]) / str(os.getpid())
        path.write_text(" ".join(f"{name}={count}" for name, count in COUNTS.items()))
        return original(*args, **kwargs)

    return call
