"""Backend `triton`: our own kernels (package moe_dist_kernels) on a CUDA GPU, or under Triton's interpreter in tests.

Says which tactics can run and binds them; what they are is `triton_tactics.py`'s. The kernels and how they are launched are the
other package's; it, and triton with it, is imported when something is about to run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.triton_tactics import (
    DECODE_FIELDS,
    INVARIANT,
    SMALL_CARD,
    SORTED_FIELDS,
    SPECIALISED_FIELDS,
    defaults,
    plan_of,
    worth_timing,
)
from moe_dist.config import BackendConfig
from moe_dist.errors import UnsupportedBackend
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, CompileAhead, Tactic, Workspace

if TYPE_CHECKING:
    from moe_dist_kernels import ExpertsShape, RouterShape
    from moe_dist_kernels.ahead import Variant

_MOST_TACTICS = 24  # of one bucket: what a tuner can time within its budget
_ANY = Bucket(1, 1 << 30)  # a bucket for "any count": the sorted path at its widest


@dataclasses.dataclass(frozen=True)
class TritonConfig(BackendConfig):
    """Parameters of the triton backend: it has none, its choices are tactics."""

    name: ClassVar[str] = "triton"


class TritonBackend(Backend):
    """Route, sort, two grouped products with the activation fused, finalize; without the sort for a few tokens."""

    name = "triton"
    config_type = TritonConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        config = problem.config
        if device.type != "cuda":
            if device.type != "cpu" or not _interpreting():
                return f"it needs a CUDA GPU, not {device.type!r} (tests may set TRITON_INTERPRET=1)"
            if config.quant.dtype == "bf16":
                return "Triton's interpreter computes bf16 wrongly; interpret in fp32 or fp16"
        elif not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            return f"there is no device {device} in this process"
        elif torch.cuda.get_device_capability(device) < (8, 0):
            major, minor = torch.cuda.get_device_capability(device)
            return f"compute capability {major}.{minor} has no bf16 matrix units or asynchronous copies; it needs 8.0"
        quant = config.quant
        if quant.weight is not None and (quant.weight, quant.granularity, quant.block_shape) != ("fp8", "block", (128, 128)):
            return (
                f"it has kernels for unquantised weights and for fp8 in blocks of (128, 128), not for {quant.weight} by {quant.granularity} "
                f"{quant.block_shape or ''}".rstrip()
            )
        reason = _shape(problem, num_local=1, mapped=False).why_not()
        if reason is not None:
            return reason
        return None

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        if problem.config.execution.batch_invariant:
            return [self.default(problem, bucket, device)]
        first, *instead = defaults(problem, bucket)
        likely = [first, *worth_timing(problem, bucket)]
        if self.why_not_tactic(problem, first, bucket, device) is not None:
            likely += instead  # slower ones, for cards that can't run the first
        runnable = (tactic for tactic in dict.fromkeys(likely) if self.why_not_tactic(problem, tactic, bucket, device) is None)
        return list(itertools.islice(runnable, _MOST_TACTICS))

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        if problem.config.execution.batch_invariant:
            wanted = [INVARIANT]
        else:
            wanted = defaults(problem, bucket or _ANY)
        for tactic in wanted:
            if self.why_not_tactic(problem, tactic, bucket, device) is None:
                return tactic
        return SMALL_CARD

    def why_not_tactic(self, problem: MoEProblem, tactic: Tactic, bucket: Bucket | None, device: torch.device) -> str | None:
        """Beyond what base promises: any parameters that the kernels can run are accepted, not only those that are timed."""
        if tactic.backend != self.name or tactic.collective:
            return f"{tactic} is not a tactic of backend 'triton'"
        if problem.config.execution.batch_invariant and tactic not in (INVARIANT, SMALL_CARD):
            return f"batch invariance has one family of tactics, {INVARIANT}"
        fields = {name for name, _ in tactic.params}
        known = (DECODE_FIELDS, SORTED_FIELDS, SPECIALISED_FIELDS)
        if fields not in known:
            return f"{tactic} has parameters {sorted(fields)}; known are {' or '.join(str(sorted(names)) for names in known)}"
        try:
            plan = plan_of(tactic)
        except TypeError as error:
            return str(error)
        from moe_dist_kernels import Limits, SpecialisedPlan

        if isinstance(plan, SpecialisedPlan) and device.type == "cpu" and _interpreting():
            return "warp-specialised kernels can't be interpreted"
        return plan.why_not(_shape(problem, num_local=1, mapped=False), Limits.of(device))

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        from moe_dist_kernels import scratch

        experts = max(1, len(problem.local_experts(0)))  # rank 0 holds the most
        layout = scratch(_shape(problem, num_local=experts, mapped=False), plan_of(tactic), num_tokens, routed=problem.routed)
        return Workspace(layout.nbytes)

    def compile_ahead(self, layer: BoundLayer, tactics: Sequence[Tactic], how: CompileAhead) -> int:
        device = layer.weights.w13.device
        if device.type != "cuda":
            return 0
        from moe_dist_kernels import ahead

        router = None if layer.problem.routed else _router(layer.problem, torch.float32)  # as probes bring logits
        shape, pdl = _bound_shape(layer), _uses_pdl(layer)
        done = ahead.compile_ahead(
            [ahead.Variant(shape=shape, plan=plan_of(tactic), pdl=pdl, router=router) for tactic in tactics],
            ahead.target_of(device),
            processes=max(1, len(os.sched_getaffinity(0)) // min(how.ranks, torch.cuda.device_count())),
            first=how.rank / how.ranks,
            deadline=how.deadline,
            progress=how.progress,
        )
        return done.compiled

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        from moe_dist_kernels import Experts

        problem, weights = layer.problem, layer.weights
        reason = self.why_not(problem, weights.w13.device, TritonConfig()) or self.why_not_tactic(problem, tactic, None, weights.w13.device)
        if reason is not None:
            raise UnsupportedBackend(self.name, reason)
        pdl, shape, plan = _uses_pdl(layer), _bound_shape(layer), plan_of(tactic)
        routers: dict[torch.dtype, Experts] = {}

        def experts_for(logits: torch.Tensor | None) -> Experts:
            dtype = torch.float32 if logits is None else logits.dtype
            found = routers.get(dtype)
            if found is None:
                found = routers[dtype] = Experts(
                    shape,
                    plan,
                    w13=weights.w13,
                    w2=weights.w2,
                    w13_scale=weights.w13_scale,
                    w2_scale=weights.w2_scale,
                    w13_bias=weights.w13_bias,
                    w2_bias=weights.w2_bias,
                    expert_map=layer.expert_map,
                    router=_router(problem, dtype),
                    correction_bias=weights.correction_bias,
                    pdl=pdl,
                )
            return found

        routed = experts_for(None)

        def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
            logits = acts.router_logits
            if logits is None:
                routed(acts.hidden_states, out, ids=acts.topk_ids, weights=acts.topk_weights)
            else:
                experts_for(logits)(acts.hidden_states, out, logits=logits)
            return tactic

        return run


def _interpreting() -> bool:
    from moe_dist_kernels import is_interpreted

    return is_interpreted()


def _shape(problem: MoEProblem, *, num_local: int, mapped: bool) -> ExpertsShape:
    from moe_dist_kernels import ExpertsShape

    config = problem.config
    return ExpertsShape(
        dtype=problem.dtype,
        hidden=config.experts.hidden_size,
        inter=problem.local_intermediate,
        slots=config.routing.slots,
        num_local=num_local,
        map_size=config.routing.total_experts if mapped else None,
        kind=config.activation.kind,
        limit=config.activation.limit,
        alpha=config.activation.alpha,
        beta=config.activation.beta,
        weight_on_input=config.routing.weight_on_input,
        finalize=config.execution.do_finalize,
        fp8=config.quant.weight == "fp8",
    )


def _bound_shape(layer: BoundLayer) -> ExpertsShape:
    """The shape of a layer with its weights, biases and map."""
    weights = layer.weights
    return dataclasses.replace(
        _shape(layer.problem, num_local=layer.num_local_experts, mapped=layer.expert_map is not None),
        up_bias=None if weights.w13_bias is None else weights.w13_bias.dtype,
        down_bias=None if weights.w2_bias is None else weights.w2_bias.dtype,
    )


def _uses_pdl(layer: BoundLayer) -> bool:
    asked, device = layer.problem.config.execution.enable_pdl, layer.weights.w13.device
    return asked if asked is not None else device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _router(problem: MoEProblem, logits_dtype: torch.dtype) -> RouterShape:
    from moe_dist_kernels import RouterShape

    routing = problem.config.routing
    return RouterShape(
        logits_dtype=logits_dtype,
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        n_group=routing.n_group,
        topk_group=routing.topk_group,
        num_shared=routing.num_fused_shared_experts,
        scoring=routing.scoring,
        renormalize=routing.renormalize,
        scale=routing.routed_scaling_factor,
        bias=routing.correction_bias is not None,
    )


def compiled_variants(problem: MoEProblem, buckets: Sequence[Bucket], arch: int) -> list[dict[str, Any]]:
    """Every kernel of every tactic worth timing for `buckets`, compiled for compute capability `arch` (90 for 9.0), which need not be here.

    Rows of `kernel_variants`, with registers, local_bytes, shared_bytes, matrix_unit, or `reason` if it does not compile.
    """
    from moe_dist_kernels import ahead

    rows, work = kernel_variants(problem, buckets, arch)
    found = ahead.usages(work, ahead.target_for(arch), processes=len(os.sched_getaffinity(0)))
    return [
        row | ({"reason": usage} if isinstance(usage, str) else dataclasses.asdict(usage)) for row, usage in zip(rows, found, strict=True)
    ]


def kernel_variants(problem: MoEProblem, buckets: Sequence[Bucket], arch: int) -> tuple[list[dict[str, Any]], list[tuple[Variant, str]]]:
    """Every kernel of every tactic worth timing, once: rows that say how it is cut, and in the same order what launches it."""
    from moe_dist_kernels import Limits, ahead
    from moe_dist_kernels.launch import Descriptor

    cpu, limits, backend = torch.device("cpu"), Limits(has_wgmma=arch == 90), TritonBackend()
    tactics = dict.fromkeys(
        tactic
        for bucket in buckets
        for tactic in (backend.default(problem, bucket, cpu), *backend.tactics(problem, bucket, cpu, TritonConfig()))
    )
    shape = _shape(problem, num_local=problem.config.routing.total_experts, mapped=False)
    variants = [
        ahead.Variant(shape=shape, plan=plan, pdl=True) for tactic in tactics if (plan := plan_of(tactic)).why_not(shape, limits) is None
    ]
    rows, work = [], list(ahead.distinct(variants, ahead.target_for(arch)).values())
    for variant, name in work:
        launch = variant.launches()[name]
        given = [param for param in launch.params if param is not None]
        descriptors = sum(isinstance(param, Descriptor) for param in given)
        named = {"arch": arch, "kernel": launch.kernel.__name__, "launch": name, "arguments": len(given), "descriptors": descriptors}
        rows.append({**named, **launch.constants, "warps": launch.num_warps, "stages": launch.num_stages})
    return rows, work
