"""Tuning in vLLM's warm-up: which layers are ours, which ranks run in step, which token counts will run. The rest is `moe_dist.serving`.

Called twice in each worker: while vLLM finds out what is left for the KV cache, so that the scratch of whatever wins is counted; and
when that is sized and nothing is captured yet, to tune.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state

from moe_dist.interop.hf_config import experts_said
from moe_dist.serving import ServedModel, TokenCounts
from moe_dist.settings import ServingSettings
from moe_dist_vllm.compat import NAME
from moe_dist_vllm.experts import MoEDistExperts, scratch_in_each_call
from moe_dist_vllm.native import versions
from moe_dist_vllm.patch import say_once, settings_of

log = logging.getLogger("moe_dist.vllm")


_LIMIT = "_moe_dist_workspace"  # on the worker: the bytes that were counted before KV sizing
_GATE_AND_UP = ("w13_weight", "w13_qweight", "w13_weight_packed")  # as vLLM's formats call what its routed experts keep


def tune(worker: Any) -> ServedModel:
    """Tune the layers of this worker's model together with the ranks that run in step. RuntimeError: vLLM gave a layer other experts."""
    model, counts = served_model(worker)
    timeout = timedelta(seconds=envs.VLLM_ENGINE_READY_TIMEOUT_S)
    with set_current_vllm_config(worker.vllm_config):  # vLLM's own experts read it when they are made
        model.tune(counts, group_in_step(), timeout, workspace_limit=getattr(worker, _LIMIT, None))
    worker.moe_dist = model
    return model


@contextlib.contextmanager
def scratch_counted(worker: Any) -> Iterator[None]:
    """While it lasts, vLLM's profile run takes as much memory as any tactic that may win later: what is left is the KV cache's.

    Where vLLM's own experts are the default, that run takes it anyway, and nothing is lost to stock.
    """
    model, counts = served_model(worker)
    with set_current_vllm_config(worker.vllm_config):
        limit = model.workspace_bytes(counts)
    setattr(worker, _LIMIT, limit)
    runner = worker.model_runner
    run = runner.profile_run

    def profile_run(*args: Any, **kwargs: Any) -> Any:
        with scratch_in_each_call(limit):
            return run(*args, **kwargs)

    runner.profile_run = profile_run
    try:
        yield
    finally:
        del runner.profile_run


def served_model(worker: Any) -> tuple[ServedModel, TokenCounts]:
    """The layers of this worker, each with its place in one model, and what they will run. RuntimeError: vLLM gave a layer other experts."""
    config = worker.vllm_config
    settings = settings_of(config)
    ours, others = [], []
    for name, module in moe_layers(worker):
        experts = getattr(getattr(module.quant_method, "moe_kernel", None), "fused_experts", None)
        if not isinstance(experts, MoEDistExperts):
            others.append(f"{name}: {type(experts).__name__ if experts is not None else type(module.quant_method).__name__}")
            continue
        ours.append((name, module, experts))
    if others and settings.unserved == "error":
        raise RuntimeError(
            f"--moe-backend=moe_dist was asked for, but vLLM runs its own experts in {len(others)} layers, first {others[0]}; "
            "choose another --moe-backend, or set MOE_DIST_UNSERVED=native to accept that"
        )
    if others:  # by a method of vLLM's that asks no oracle, or after one refused us, which the log has with its reason
        say_once(f"of --moe-backend=moe_dist {len(others)} layers run vLLM's own experts, first {others[0]}")
    if not ours and not others and config.parallel_config.pipeline_parallel_size == 1:  # one stage may well have none
        require_dense(config.model_config.hf_text_config, settings)
    counts = token_counts(config)
    pool = versions() if any(experts.natives for _, _, experts in ours) else {}
    model = ServedModel(settings, deployment=deployment(config), versions=pool, earlier=getattr(worker, "moe_dist", None))
    with set_current_vllm_config(config):
        for name, module, experts in ours:
            experts.serve(model, name, module.w13_weight, module.w2_weight, module.expert_map, counts.max_num_tokens)
    return model, counts


def require_dense(text_config: Any, settings: ServingSettings) -> None:
    """RuntimeError: the model has experts, and no module that we know computes them."""
    experts = experts_said(text_config)
    reason = f"the model's config has {experts}, and none of its modules asks for the experts of --moe-backend"
    if experts and settings.unserved == "error":
        raise RuntimeError(
            f"--moe-backend=moe_dist serves nothing: {reason}; choose another, or set MOE_DIST_UNSERVED=native to accept that"
        )
    log.warning("moe_dist serves nothing: %s", reason if experts else "the model has no MoE layer")


def moe_layers(worker: Any) -> Iterator[tuple[str, Any]]:
    """The modules whose routed experts were asked to be ours, of the model and of a draft model beside it, which may ask for others."""
    runner = worker.model_runner
    proposers = (getattr(runner, name, None) for name in ("drafter", "speculator"))  # as each of vLLM's two model runners calls it
    for prefix, model in (("", runner.get_model()), *(("draft.", getattr(proposer, "model", None)) for proposer in proposers)):
        if isinstance(model, torch.nn.Module):
            for name, module in model.named_modules():
                stores = any(hasattr(module, weight) for weight in _GATE_AND_UP)
                if stores and hasattr(module, "quant_method") and module.moe_config.moe_backend == NAME:
                    yield prefix + name, module


def group_in_step() -> Any:
    """The ranks that run every MoE layer in lock step: vLLM's expert-parallel group, which spans DP x TP of a pipeline stage whether
    experts are shared out or cut; None: this rank runs alone."""
    coordinator = parallel_state._EP if parallel_state._EP is not None else parallel_state.get_tp_group()
    return coordinator.cpu_group if coordinator.world_size > 1 else None


def token_counts(config: Any) -> TokenCounts:
    """What a MoE layer will see: with data parallelism the rows of all its ranks, padded alike."""
    ranks = config.parallel_config.data_parallel_size
    largest = config.scheduler_config.max_num_batched_tokens
    compilation = config.compilation_config
    mode = getattr(compilation.cudagraph_mode, "name", "NONE")
    sizes = compilation.cudagraph_capture_sizes or () if mode != "NONE" and not config.model_config.enforce_eager else ()
    on_gpu = config.device_config.device_type == "cuda"
    captured = sizes if on_gpu else ()
    # Graphs of whole decode steps alone: every prefill is eager, however short.
    return TokenCounts.gathered(largest, captured, ranks, eager_from=1 if captured and mode == "FULL_DECODE_ONLY" else None)


def deployment(config: Any) -> str:
    """Replicas of one model in one layout share epochs."""
    parallel = config.parallel_config
    layout = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}-dp{parallel.data_parallel_size}"
    stage = parallel_state.get_pp_group().rank_in_group
    ep = "-ep" if parallel.enable_expert_parallel else ""
    return f"vllm:{config.model_config.served_model_name or config.model_config.model}:{layout}{ep}:stage{stage}"
