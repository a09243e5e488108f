"""From a loaded model to tuned layers: every MoE layer gets its `MoELayer`, or start-up ends with the reason.

Called by `hooks.py` after SGLang has loaded a model and when it warms up; what is served hangs on the model runner, so that a
draft model has its own. Says what of SGLang goes where; `moe_dist.serving` does the rest.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import sglang
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

import moe_dist as md
from moe_dist.serving import ServedModel, TokenCounts
from moe_dist.settings import serving_settings
from moe_dist_sglang.layers import layer_config, layer_weights, routed_scale, unserved, why_not
from moe_dist_sglang.native import SGLangBackend
from moe_dist_sglang.runner import MoEDistRunnerCore

log = logging.getLogger("moe_dist.sglang")

SERVED = "moe_dist_served"  # the model runner's attribute that holds a `ServedModel` until it is tuned
# The other stages of a pipeline may wait in a collective for as long as torch's default for NCCL.
STARTUP_TIMEOUT = timedelta(minutes=10)


def attach(model_runner: Any) -> None:
    """Bind every MoE layer of the loaded model. UnsupportedBackend: a layer doesn't have our runner, and why."""
    settings = serving_settings()
    model = ServedModel(settings, deployment=deployment(model_runner), versions={"sglang": sglang.__version__})
    for name, layer in model_runner.model.named_modules():
        if not isinstance(layer, FusedMoE):
            continue
        method, core = layer.quant_method, getattr(layer.runner, "runner_core", None)
        if not isinstance(core, MoEDistRunnerCore) or layer.runner is not method.runner:
            reason = f"{name}: {why_not(layer, method) or f'SGLang gave it the runner {layer.runner_backend}'}"
            if settings.unserved == "error":
                raise unserved(reason)
            log.warning("not served by moe_dist: %s", reason)
            continue
        try:
            config, weights, native = layer_config(layer, method), layer_weights(layer, method), SGLangBackend(layer, method)
            served = model.add(name, _native_first(config, native, weights.w13.device), weights, [native])
        except md.UnsupportedBackend as error:
            raise unserved(f"{name}: {error.reason}", error.reasons) from error
        core.bind(served, weights, routed_scale(layer))
    setattr(model_runner, SERVED, model)


def _native_first(config: md.MoEConfig, native: SGLangBackend, device: torch.device) -> md.MoEConfig:
    """`config` with every backend that can run it, SGLang's own first: the first is the default."""
    found = md.find_backends(config, device, extra_backends=[native])
    ordered = [option for option in found if option.name == native.name] + [
        option for option in found if option.name not in (native.name, md.ReferenceConfig.name)
    ]
    return dataclasses.replace(config, backends=md.BackendOptions(tuple(ordered)) if ordered else None)


def tune(model_runner: Any) -> None:
    """Tune the model once, together with the ranks that run it in step: after KV allocation, before anything is captured."""
    model: ServedModel | None = getattr(model_runner, SERVED, None)
    if model is None:
        return
    setattr(model_runner, SERVED, None)  # SGLang warms up once more for each kind of graph
    parallel = get_parallel()
    group = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
    timeout = timedelta(seconds=parallel.dist_timeout) if parallel.dist_timeout else STARTUP_TIMEOUT
    if model_runner.device != "cuda":
        model.tune(token_counts(model_runner), group, timeout)
        return
    stream = model_runner.forward_stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model.tune(token_counts(model_runner), group, timeout)
    torch.cuda.current_stream().wait_stream(stream)


def token_counts(model_runner: Any) -> TokenCounts:
    """What a MoE layer will see: under attention data parallelism the rows of all its ranks, padded alike."""
    schedule, graphs = get_schedule(), get_exec().graph.cuda_graph_config
    gathered = get_parallel().attn_dp_size
    rows = model_runner.decode_num_tokens_per_req()
    chunk = schedule.chunked_prefill_size
    largest = chunk if chunk and chunk > 0 else schedule.max_prefill_tokens
    decode = model_runner.max_running_requests * rows
    largest = max(largest + (decode if schedule.enable_mixed_chunk else 0), decode)
    captured: set[int] = set()
    prefill_graphs = False
    if model_runner.device == "cuda" and graphs is not None:
        if graphs.decode.backend != "disabled":
            captured |= {size * rows for size in get_batch_sizes_to_capture(model_runner, rows)[0]}
        prefill_graphs = graphs.prefill.backend != "disabled" and bool(graphs.prefill.bs)
        captured |= set(graphs.prefill.bs) if prefill_graphs else set()
    # Without graphs of its own, every prefill runs eagerly, however short.
    return TokenCounts(largest * gathered, _times(captured, gathered, largest), eager_from=1 if captured and not prefill_graphs else None)


def _times(counts: Iterable[int], gathered: int, largest: int) -> tuple[int, ...]:
    return tuple(sorted({count * gathered for count in counts if count <= largest}))


def deployment(model_runner: Any) -> str:
    """Replicas of one model in one layout share epochs; a draft model, and each stage of a pipeline, has its own."""
    parallel, args = get_parallel(), model_runner.server_args
    layout = f"tp{parallel.tp_size}-ep{parallel.moe_ep_size}-dp{parallel.attn_dp_size}-pp{parallel.pp_size}"
    draft = ":draft" if model_runner.is_draft_worker else ""
    return f"sglang:{args.served_model_name or args.model_path}:{layout}:stage{parallel.pp_rank}{draft}"
