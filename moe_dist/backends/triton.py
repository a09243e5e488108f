"""Backend `triton`: our own kernels (package moe_dist_kernels) on a CUDA GPU, or under Triton's interpreter in tests.

Owns the tactics: their names, which are worth timing for a bucket, which can run, which runs untuned. The kernels and
how they are launched are the other package's; it, and triton with it, is imported when something is about to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.config import BackendConfig
from moe_dist.errors import UnsupportedBackend
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, Scalar, Tactic, Workspace

if TYPE_CHECKING:
    from moe_dist_kernels import ExpertsShape, Plan, RouterShape

_DECODE_FIELDS = ("down_k", "down_n", "down_warps", "path", "up_k", "up_n", "up_warps")
_SORTED_FIELDS = (
    "block_m",
    "down_k",
    "down_n",
    "down_stages",
    "down_warps",
    "group_m",
    "path",
    "swap_ab",
    "up_k",
    "up_n",
    "up_stages",
    "up_warps",
)
_ANY = Bucket(1, 1 << 30)  # a bucket for "any count": the sorted path at its widest


@dataclasses.dataclass(frozen=True)
class TritonConfig(BackendConfig):
    """Parameters of the triton backend: it has none, its choices are tactics."""

    name: ClassVar[str] = "triton"


def _decode(up: tuple[int, int, int], down: tuple[int, int, int]) -> Tactic:
    """The small path; up and down are (columns, depth, warps)."""
    return Tactic.of("triton", path="decode", up_n=up[0], up_k=up[1], up_warps=up[2], down_n=down[0], down_k=down[1], down_warps=down[2])


def _sorted(
    block_m: int, up: tuple[int, int, int, int], down: tuple[int, int, int, int], *, group_m: int = 1, swap_ab: bool = False
) -> Tactic:
    """The sorted path; up and down are (columns, depth, warps, stages)."""
    return Tactic.of(
        "triton",
        path="sorted",
        block_m=block_m,
        group_m=group_m,
        swap_ab=swap_ab,
        up_n=up[0],
        up_k=up[1],
        up_warps=up[2],
        up_stages=up[3],
        down_n=down[0],
        down_k=down[1],
        down_warps=down[2],
        down_stages=down[3],
    )


# One family for batch invariance: whatever the batch, a row meets the same instructions in the same order.
_INVARIANT = _sorted(64, (64, 64, 4, 4), (128, 64, 4, 4), group_m=8)
# Runs everywhere that Triton does, in any dtype, within the 99 KB of shared memory that the smallest cards give.
_SMALL_CARD = _sorted(32, (32, 32, 4, 3), (64, 32, 4, 3), group_m=8)


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
        if config.quant.weight is not None:
            return f"it has no kernels for {config.quant.weight} weights; use unquantised ones"
        rows = problem.local_intermediate * (2 if config.activation.gated else 1)
        if rows * config.experts.hidden_size >= 2**31:
            return f"one expert's first product has {rows} x {config.experts.hidden_size} weights; its offsets inside an expert are 32 bits wide"
        return None

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        if problem.config.execution.batch_invariant:
            return [self.default(problem, bucket, device)]
        return [
            tactic
            for tactic in dict.fromkeys(_worth_timing(problem, bucket))
            if self.why_not_tactic(problem, tactic, bucket, device) is None
        ]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        if problem.config.execution.batch_invariant:
            wanted = [_INVARIANT]
        else:
            wanted = _defaults(problem, bucket or _ANY)
        for tactic in wanted:
            if self.why_not_tactic(problem, tactic, bucket, device) is None:
                return tactic
        return _SMALL_CARD

    def why_not_tactic(self, problem: MoEProblem, tactic: Tactic, bucket: Bucket | None, device: torch.device) -> str | None:
        """Beyond what base promises: any parameters that the kernels can run are accepted, not only those that are timed."""
        if tactic.backend != self.name or tactic.collective:
            return f"{tactic} is not a tactic of backend 'triton'"
        if problem.config.execution.batch_invariant and tactic not in (_INVARIANT, _SMALL_CARD):
            return f"batch invariance has one family of tactics, {_INVARIANT}"
        fields = tuple(name for name, _ in tactic.params)
        if fields not in (_DECODE_FIELDS, _SORTED_FIELDS):
            return f"{tactic} has parameters {fields}; known are {_DECODE_FIELDS} and {_SORTED_FIELDS}"
        try:
            plan = _plan(tactic)
        except TypeError as error:
            return str(error)
        from moe_dist_kernels import shared_memory_limit

        return plan.why_not(_shape(problem, num_local=1, mapped=False), shared_memory_limit(device))

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        from moe_dist_kernels import scratch

        experts = max(1, len(problem.local_experts(0)))  # rank 0 holds the most
        layout = scratch(_shape(problem, num_local=experts, mapped=False), _plan(tactic), num_tokens, routed=problem.routed)
        return Workspace(layout.nbytes)

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        from moe_dist_kernels import Experts

        problem, weights = layer.problem, layer.weights
        reason = self.why_not(problem, weights.w13.device, TritonConfig()) or self.why_not_tactic(problem, tactic, None, weights.w13.device)
        if reason is not None:
            raise UnsupportedBackend(self.name, reason)
        pdl = problem.config.execution.enable_pdl
        if pdl is None:
            pdl = weights.w13.device.type == "cuda" and torch.cuda.get_device_capability(weights.w13.device) >= (9, 0)
        shape = _shape(problem, num_local=layer.num_local_experts, mapped=layer.expert_map is not None)
        up_bias, down_bias = weights.w13_bias, weights.w2_bias
        shape = dataclasses.replace(
            shape,
            up_bias=None if up_bias is None else up_bias.dtype,
            down_bias=None if down_bias is None else down_bias.dtype,
        )
        plan = _plan(tactic)
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
    )


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


def _number(tactic: Tactic, name: str) -> int:
    value: Scalar = tactic[name]
    if type(value) is not int:
        raise TypeError(f"{name} of {tactic} is {value!r}; it must be an integer")
    return value


def _plan(tactic: Tactic) -> Plan:
    """The kernels' plan of a tactic with the right fields. TypeError: a parameter of the wrong type."""
    from moe_dist_kernels import DecodePlan, DecodeTile, ProductTile, SortedPlan

    def side(name: str) -> dict[str, int]:
        return {"block_n": _number(tactic, f"{name}_n"), "block_k": _number(tactic, f"{name}_k"), "warps": _number(tactic, f"{name}_warps")}

    if tactic["path"] == "decode":
        return DecodePlan(up=DecodeTile(**side("up")), down=DecodeTile(**side("down")))
    if tactic["path"] != "sorted" or type(tactic["swap_ab"]) is not bool:
        raise TypeError(f"path {tactic['path']!r}, swap_ab {tactic['swap_ab']!r} of {tactic}: path is decode or sorted, swap_ab a bool")
    return SortedPlan(
        block_m=_number(tactic, "block_m"),
        group_m=_number(tactic, "group_m"),
        swap_ab=tactic["swap_ab"],
        up=ProductTile(**side("up"), stages=_number(tactic, "up_stages")),
        down=ProductTile(**side("down"), stages=_number(tactic, "down_stages")),
    )


def _rows_per_expert(problem: MoEProblem, num_tokens: int) -> float:
    routing = problem.config.routing
    return num_tokens * routing.slots / routing.total_experts


def _defaults(problem: MoEProblem, bucket: Bucket) -> list[Tactic]:
    """The untuned choice and what replaces it where it can't run, in order."""
    slots = bucket.high * problem.config.routing.slots
    rows = _rows_per_expert(problem, bucket.high)
    if slots <= 32:
        return [_decode((4, 512, 4), (8, 256, 4))]
    if rows <= 24:
        return [_sorted(16, (64, 128, 4, 4), (64, 128, 4, 4)), _sorted(16, (32, 64, 4, 3), (64, 64, 4, 3))]
    if rows <= 96:
        return [_sorted(64, (64, 64, 4, 4), (128, 64, 4, 4), group_m=8), _sorted(32, (64, 32, 4, 3), (64, 64, 4, 3), group_m=8)]
    return [_sorted(128, (128, 64, 8, 4), (256, 64, 8, 4), group_m=8), _sorted(64, (64, 32, 4, 3), (128, 32, 4, 3), group_m=8)]


def _worth_timing(problem: MoEProblem, bucket: Bucket) -> Iterator[Tactic]:
    """At most 24 tactics, the likely ones first."""
    yield from _defaults(problem, bucket)
    slots = bucket.high * problem.config.routing.slots
    rows = _rows_per_expert(problem, bucket.high)
    if slots <= 128:
        for up in ((4, 512, 4), (8, 256, 4), (4, 256, 2)):
            for down in ((4, 512, 4), (8, 256, 4), (4, 256, 2)):
                yield _decode(up, down)
    if slots > 8 and rows <= 48:
        for up_n, up_k, stages in ((64, 128, 4), (32, 128, 5), (64, 64, 6)):
            for down_n in (64, 128):
                yield _sorted(16, (up_n, up_k, 4, stages), (down_n, 128, 4, 4))
                yield _sorted(16, (64, up_k, 4, min(4, stages)), (down_n, 128, 4, 4), swap_ab=True)
    if 12 < rows <= 160:
        yield _sorted(32, (64, 128, 4, 4), (128, 64, 4, 4), group_m=4)
        yield _sorted(64, (64, 64, 4, 4), (128, 64, 4, 4), group_m=8)
        yield _sorted(64, (128, 64, 8, 4), (128, 64, 4, 4), group_m=8)
    if rows > 48:
        for group_m in (4, 16):
            yield _sorted(64, (128, 64, 8, 4), (256, 64, 8, 4), group_m=group_m)
            yield _sorted(128, (128, 64, 8, 3), (256, 64, 8, 3), group_m=group_m)
            yield _sorted(128, (128, 64, 8, 4), (128, 64, 8, 4), group_m=group_m)
            yield _sorted(128, (64, 64, 8, 4), (128, 64, 4, 4), group_m=group_m)
