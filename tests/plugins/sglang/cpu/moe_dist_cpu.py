"""A second SGLang plugin, for tests alone: lets the engine run without a GPU, and counts what our runner core did.

Counts of a process go to `$MOE_DIST_TEST_COUNTS/<pid>`: the calls of our core, those of them that ask for rows or have fused shared
experts, and the calls of SGLang's own CPU experts.
With `$MOE_DIST_TEST_STEAL` set, the MoE layer of that number gets SGLang's Triton runner after all; with `$MOE_DIST_TEST_ROWS`, that
layer asks for a weighted row a slot (`no_combine`), and the model sums them; with `$MOE_DIST_TEST_FUSE`, GLM fuses its shared expert,
which SGLang does on a card alone; with `$MOE_DIST_TEST_POOL`, --enable-symm-mem is obeyed without a card, and calls of our core whose
result alone lies in the pool are counted, with their bytes; with `$MOE_DIST_TEST_DRAFT`, what a draft is served with runs without a card.
"""

import contextlib
import copy
import os
import sys
from pathlib import Path

COUNTS = {"core": 0, "native": 0}


def register() -> None:
    import sglang.srt.distributed.device_communicators.pynccl_allocator as pynccl_allocator
    import sglang.srt.distributed.parallel_state as parallel_state
    import sglang.srt.layers.attention.torch_native_backend as torch_native
    import sglang.srt.layers.dp_attention as dp_attention
    import sglang.srt.layers.quantization.fp8 as fp8
    import sglang.srt.layers.rotary_embedding.base as rotary
    import sglang.srt.model_executor.forward_batch_info as forward_batch_info
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rotary._is_cpu = True  # else it looks for a CUDA kernel
    # What attention data parallelism asks for, and SGLang has for its own CPU build alone.
    forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    parallel_state.GroupCoordinator.all_gather_into_tensor = _gather
    torch_native.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    fp8.scaled_fp8_quant = _quantise  # CUDA's alone
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
    if "MOE_DIST_TEST_POOL" in os.environ:
        HookRegistry.register("sglang.srt.arg_groups.platform_hook.handle_symm_mem_device_support", _none, HookType.REPLACE)
        HookRegistry.register("moe_dist_sglang.runner.MoEDistRunnerCore.run_from_dispatch", _in_pool, HookType.AROUND)
        pynccl_allocator.SymmetricMemoryContext = _Pool
    if "MOE_DIST_TEST_DRAFT" in os.environ:
        _serve_drafts()
    if "MOE_DIST_TEST_FUSE" in os.environ:
        Glm4MoeForCausalLM.shared_experts_fusion_disable_reason = classmethod(_none)


def _gather(group, output, rows):
    from sglang.srt.distributed.utils import all_gather_single

    all_gather_single(output, rows, group=group.device_group)


def _serve_drafts():
    """SGLang's Triton kernels in Triton's interpreter, and its torch attention for the rows that verify a draft.

    Left out is what no call of these tests needs: copies of cache rows, which only a tree of drafts has, and a second attention backend.
    """
    import sglang.kernels.ops.speculative.spec_tree as spec_tree
    import sglang.srt.mem_cache.memory_pool as memory_pool
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401  with its kernels
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    spec_tree._is_xpu = True  # whose drafts are verified by Triton
    for name, module in list(sys.modules.items()):
        if name.startswith(("sglang.", "triton.language")):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))
    memory_pool.copy_all_layer_kv_cache_func = lambda *args: None
    torch.cuda.synchronize = lambda *args: None
    HookRegistry.register("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", _none, HookType.REPLACE)
    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"
    HookRegistry.register(attention, _verify_drafts, HookType.AROUND)


def _verify_drafts(original, backend, q, k, v, layer, forward_batch, **rest):
    """A draft of one token a step is verified as a prompt is extended; SGLang says these lengths to its Triton attention alone."""
    if forward_batch.forward_mode.is_target_verify():
        forward_batch = copy.copy(forward_batch)
        before = forward_batch.seq_lens
        forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens = before, before.new_full(before.shape, q.shape[0] // len(before))
        forward_batch.seq_lens = before + forward_batch.extend_seq_lens
    return original(backend, q, k, v, layer, forward_batch, **rest)


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


class _Pool:
    """In the place of SGLang's symmetric pool: notes what our core allocates inside. Entering it twice is an error there too."""

    entered, in_core, allocated = False, False, []

    def __init__(self, group):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                _Pool.allocated.append((result.untyped_storage().data_ptr(), result.nbytes))
                return result

        self._noting = Noting() if _Pool.in_core else contextlib.nullcontext()

    def __enter__(self):
        assert not _Pool.entered, "SGLang's pool is entered inside itself"
        _Pool.entered = True
        self._noting.__enter__()

    def __exit__(self, *error):
        self._noting.__exit__(*error)
        _Pool.entered = False


def _in_pool(original, *args, **kwargs):
    """A call of our core, which counts if its result, and nothing else, was allocated in the pool."""
    _Pool.allocated, _Pool.in_core = [], True
    result = original(*args, **kwargs)
    _Pool.in_core = False
    out = result.hidden_states
    if _Pool.allocated == [(out.data_ptr(), out.nbytes)]:
        _count("pooled")
        _count("pool_bytes", out.nbytes)
    return result


def _counting(kind):
    def call(original, *args, **kwargs):
        _count(kind)
        if kind == "core":
            config = args[3]
            for name, asked in (("rows", config.no_combine), ("shared", config.num_fused_shared_experts)):
                if asked:
                    _count(name)
        return original(*args, **kwargs)

    return call


def _count(name, more=1):
    COUNTS[name] = COUNTS.get(name, 0) + more
    path = Path(os.environ["MOE_DIST_TEST_COUNTS"]) / str(os.getpid())
    path.write_text(" ".join(f"{name}={count}" for name, count in COUNTS.items()))
