"""A second SGLang plugin, for tests alone: lets the engine run without a GPU, and counts what our runner core did.

Counts of a process go to `$MOE_DIST_TEST_COUNTS/<pid>`: the calls of our core, and the calls of SGLang's own CPU experts.
With `$MOE_DIST_TEST_STEAL` set, the MoE layer of that number gets SGLang's Triton runner after all.
"""

import os
from pathlib import Path

COUNTS = {"core": 0, "native": 0}


def register() -> None:
    import sglang.srt.layers.quantization.fp8 as fp8
    import sglang.srt.layers.rotary_embedding.base as rotary
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rotary._is_cpu = True  # else it looks for a CUDA kernel
    fp8.scaled_fp8_quant = _quantise  # CUDA's alone
    places = {
        "core": "moe_dist_sglang.runner.MoEDistRunnerCore.run_from_dispatch",
        "native": "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
    }
    for kind, place in places.items():
        HookRegistry.register(place, _counting(kind), HookType.AROUND)
    if "MOE_DIST_TEST_STEAL" in os.environ:
        HookRegistry.register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", _steal, HookType.AFTER)


def _quantise(weight, scale):
    import torch

    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _steal(result, layer, *args, **kwargs):
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    if layer.layer_id == int(os.environ["MOE_DIST_TEST_STEAL"]):
        layer.runner = layer.quant_method.runner = MoeRunner(MoeRunnerBackend.TRITON, layer.moe_runner_config)


def _counting(kind):
    def call(original, *args, **kwargs):
        COUNTS[kind] += 1
        path = Path(os.environ["MOE_DIST_TEST_COUNTS"]) / str(os.getpid())
        path.write_text(" ".join(f"{name}={count}" for name, count in COUNTS.items()))
        return original(*args, **kwargs)

    return call
