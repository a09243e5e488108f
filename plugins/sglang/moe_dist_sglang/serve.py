"""From a loaded model to tuned layers: every MoE layer gets its `MoELayer`, or start-up ends with the reason.

Called by `hooks.py` after SGLang has loaded a model and when it warms up; what is served hangs on the model runner, so that a
draft model has its own. Says what of SGLang goes where; `moe_dist.serving` does the rest.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import sglang
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

import moe_dist as md
from moe_dist.interop.hf_config import experts_said
from moe_dist.serving import ServedModel, TokenCounts
from moe_dist.settings import serving_settings
from moe_dist_sglang.compat import NAME
from moe_dist_sglang.layers import layer_config, layer_weights, routed_scale, unserved, why_not
from moe_dist_sglang.native import SGLangBackend
from moe_dist_sglang.runner import MoEDistRunnerCore

log = logging.getLogger("moe_dist.sglang")

# Attributes of the model runner, until it is tuned: its `ServedModel`, and memory that is kept free for it.
SERVED, KEPT = "moe_dist_served", "moe_dist_kept"
# The other stages of a pipeline may wait in a collective for as long as torch's default for NCCL.
STARTUP_TIMEOUT = timedelta(minutes=10)


def attach(model_runner: Any) -> None:
    """Bind every MoE layer of the loaded model. UnsupportedBackend: a layer doesn't have our runner, and why."""
    settings = serving_settings()
    model = ServedModel(settings, deployment=deployment(model_runner), versions={"sglang": sglang.__version__})
    seen = False
    for name, layer in model_runner.model.named_modules():
        if (reason := unasked(layer)) is not None:
            seen = True
            leave(f"{name}: {reason}")
            continue
        if not isinstance(layer, FusedMoE):
            continue
        seen = True
        method, core = layer.quant_method, getattr(layer.runner, "runner_core", None)
        if not isinstance(core, MoEDistRunnerCore) or layer.runner is not method.runner:
            leave(
                f"{name}: {why_not(layer, method) or f'SGLang gave it the runner {layer.runner.runner_backend if layer.runner else None}'}"
            )
            continue
        try:
            weights, native = layer_weights(layer, method), SGLangBackend(layer, method)
            served = model.add(name, layer_config(layer, method), weights, [native])
        except md.UnsupportedBackend as error:
            raise unserved(f"{name}: {error.reason}", error.reasons) from error
        core.bind(served, weights, routed_scale(layer), native if weights.w13.is_cuda else None)
    if not seen and not model_runner.is_draft_worker and get_parallel().pp_size == 1:  # a draft, or one stage, may well have none
        require_dense(model_runner.model_config.hf_text_config)
    setattr(model_runner, SERVED, model)
    setattr(model_runner, KEPT, keep(model_runner, model))


def require_choice(model_runner: Any) -> None:
    """UnsupportedBackend: SGLang put another runner in the place of the one that was asked for. A draft's may differ."""
    runs = get_moe_runner_backend().value
    if model_runner.server_args.moe_runner_backend == NAME != runs and not model_runner.is_draft_worker:
        leave(f"SGLang runs --moe-runner-backend {runs} instead of {NAME}, as its log says why")


def require_dense(text_config: Any) -> None:
    """UnsupportedBackend: the model has experts, and no module that we know computes them."""
    if experts := experts_said(text_config):
        leave(f"the model's config has {experts}, and none of its modules is a FusedMoE")
    else:
        log.warning("the model has no MoE layer: moe_dist serves nothing of it")


def leave(reason: str) -> None:
    """Leave to SGLang what `reason` names, and say so. UnsupportedBackend: the settings allow nothing unserved."""
    if serving_settings().unserved == "error":
        raise unserved(reason)
    log.warning("not served by moe_dist: %s", reason)


def unasked(block: Any) -> str | None:
    """Why `block` computes experts without asking the runner that was chosen; None: it asks, or has none."""
    kind = type(block).__name__
    if not isinstance(block, FusedMoE):
        if any(isinstance(part, TopK) for part in block.children()) and not any(isinstance(part, FusedMoE) for part in block.modules()):
            return f"{kind} has no FusedMoE: it calls SGLang's kernels itself, whatever runner is chosen"
        return None
    if type(block).forward is not FusedMoE.forward:
        return f"{kind} goes its own way to its experts"
    # Inkling alone sets this, also on its shared experts, which do ask.
    inkling = hasattr(block, "inference_moe_w13_interleaved") and not getattr(block, "is_shared_fused_moe", False)
    if inkling and isinstance(block.quant_method, UnquantizedFusedMoEMethod):
        return "Inkling's unquantised experts go to a kernel of its own, whatever runner is chosen"
    return None


def keep(model_runner: Any, model: ServedModel) -> torch.Tensor | None:
    """The scratch of one call, allocated while SGLang sizes its KV cache from what is free then, and given back before tuning.

    SGLang leaves its own experts' scratch free by itself, and where they are the default no winner needs more: None. As many bytes
    on every rank: they follow from the configs. None as well off CUDA, where nothing is sized.
    """
    if model_runner.device != "cuda" or model.default_backends() <= {SGLangBackend.name}:
        return None
    schedule = get_schedule()
    decode = (schedule.max_running_requests or 0) * model_runner.decode_num_tokens_per_req()
    nbytes = model.workspace_bytes(TokenCounts(_largest(decode) * get_parallel().attn_dp_size))
    log.info("%.1f MiB are kept free for one call while the KV cache is sized", nbytes / 2**20)
    return torch.empty(nbytes, dtype=torch.uint8, device=next(model_runner.model.parameters()).device)


def tune(model_runner: Any) -> None:
    """Tune the model once, together with the ranks that run it in step: after KV allocation, before anything is captured."""
    model: ServedModel | None = getattr(model_runner, SERVED, None)
    if model is None:
        return
    setattr(model_runner, SERVED, None)  # SGLang warms up once more for each kind of graph
    setattr(model_runner, KEPT, None)
    parallel = get_parallel()
    group = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
    timeout = timedelta(seconds=parallel.dist_timeout) if parallel.dist_timeout else STARTUP_TIMEOUT
    if model_runner.device != "cuda":
        model.tune(token_counts(model_runner), group, timeout)
        return
    counts = token_counts(model_runner)
    stream = model_runner.forward_stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model.tune(counts, group, timeout, workspace_limit=model.workspace_bytes(counts))
    torch.cuda.current_stream().wait_stream(stream)


def token_counts(model_runner: Any) -> TokenCounts:
    """What a MoE layer will see: under attention data parallelism the rows of all its ranks, padded alike."""
    graphs, gathered = get_exec().graph.cuda_graph_config, get_parallel().attn_dp_size
    rows = model_runner.decode_num_tokens_per_req()
    largest = _largest(model_runner.max_running_requests * rows)
    captured: set[int] = set()
    prefill_graphs = False
    if model_runner.device == "cuda" and graphs is not None:
        if graphs.decode.backend != "disabled":
            captured |= {size * rows for size in get_batch_sizes_to_capture(model_runner, rows)[0]}
        prefill_graphs = graphs.prefill.backend != "disabled" and bool(graphs.prefill.bs)
        captured |= set(graphs.prefill.bs) if prefill_graphs else set()
    # Without graphs of its own, every prefill runs eagerly, however short.
    return TokenCounts.gathered(largest, captured, gathered, eager_from=1 if captured and not prefill_graphs else None)


def _largest(decode: int) -> int:
    """The most rows of one step on one rank. decode: those of a step that decodes all requests."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    prefill = chunk if chunk and chunk > 0 else schedule.max_prefill_tokens
    return int(max(prefill + (decode if schedule.enable_mixed_chunk else 0), decode))


def deployment(model_runner: Any) -> str:
    """Replicas of one model in one layout share epochs; a draft model, and each stage of a pipeline, has its own."""
    parallel, args = get_parallel(), model_runner.server_args
    layout = f"tp{parallel.tp_size}-ep{parallel.moe_ep_size}-dp{parallel.attn_dp_size}-pp{parallel.pp_size}"
    if (parallel.attn_cp_size, parallel.moe_dp_size) != (1, 1):
        layout += f"-cp{parallel.attn_cp_size}-moedp{parallel.moe_dp_size}"
    draft = f":draft{model_runner.draft_model_idx or 0}" if model_runner.is_draft_worker else ""
    return f"sglang:{args.served_model_name or args.model_path}:{layout}:stage{parallel.pp_rank}{draft}"
