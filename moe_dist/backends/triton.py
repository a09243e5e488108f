"""Backend `triton`: our own kernels (package moe_dist_kernels) on a CUDA GPU, or under Triton's interpreter in tests.

Owns the tactics: their names, which are worth timing for a bucket, which can run, which runs untuned. The kernels and
how they are launched are the other package's; it, and triton with it, is imported when something is about to run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.config import BackendConfig
from moe_dist.errors import UnsupportedBackend
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, CompileAhead, Scalar, Tactic, Workspace

if TYPE_CHECKING:
    from moe_dist_kernels import ExpertsShape, Plan, RouterShape
    from moe_dist_kernels.ahead import Variant

_TILE_FIELDS = {"path", *(f"{side}_{name}" for side in ("up", "down") for name in ("n", "k", "warps"))}
_DECODE_FIELDS = {*_TILE_FIELDS, "down_early"}
_SORTED_FIELDS = {
    "block_m",
    "group_m",
    "swap_ab",
    *(f"{side}_{name}" for side in ("up", "down") for name in ("stages", "tma", "persistent")),
}
_SORTED_FIELDS |= _TILE_FIELDS
_SPECIALISED_FIELDS = {"path", "group_m", "gather"}
_MOST_TACTICS = 24  # of one bucket: what a tuner can time within its budget
_ANY = Bucket(1, 1 << 30)  # a bucket for "any count": the sorted path at its widest


@dataclasses.dataclass(frozen=True)
class TritonConfig(BackendConfig):
    """Parameters of the triton backend: it has none, its choices are tactics."""

    name: ClassVar[str] = "triton"


_Small = tuple[int, int, int]  # columns, depth, warps
_Product = tuple[int, int, int, int, str]  # columns, depth, warps, stages; "t": by the copy engine, "p": persistent


def _decode(up: _Small, down: _Small, *, early: int = 0) -> Tactic:
    """The small path. early: steps of the second product whose weights are asked for before the first is done."""
    params: dict[str, Scalar] = {"path": "decode", "down_early": early}
    for side, tile in (("up", up), ("down", down)):
        params |= {f"{side}_{name}": value for name, value in zip(("n", "k", "warps"), tile, strict=True)}
    return Tactic("triton", tuple(sorted(params.items())))


def _sorted(block_m: int, up: _Product, down: _Product, *, group_m: int = 1, swap_ab: bool = False) -> Tactic:
    """The sorted path."""
    params: dict[str, Scalar] = {"path": "sorted", "block_m": block_m, "group_m": group_m, "swap_ab": swap_ab}
    for side, tile in (("up", up), ("down", down)):
        params |= {f"{side}_{name}": value for name, value in zip(("n", "k", "warps", "stages"), tile[:4], strict=True)}
        params |= {f"{side}_tma": "t" in tile[4], f"{side}_persistent": "p" in tile[4]}
    return Tactic("triton", tuple(sorted(params.items())))


def _specialised(*, gather: bool, group_m: int = 8) -> Tactic:
    """The sorted path with warp-specialised products."""
    return Tactic.of("triton", path="specialised", group_m=group_m, gather=gather)


# One family for batch invariance: whatever the batch, a row meets the same instructions in the same order.
_INVARIANT = _sorted(64, (64, 64, 4, 4, ""), (128, 64, 4, 4, ""), group_m=8)
# Runs everywhere that Triton does, in any dtype, within the 99 KB of shared memory that the smallest cards give.
_SMALL_CARD = _sorted(32, (32, 32, 4, 3, ""), (64, 32, 4, 3, ""), group_m=8)


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
        first, *instead = _defaults(problem, bucket)
        likely = [first, *_worth_timing(problem, bucket)]
        if self.why_not_tactic(problem, first, bucket, device) is not None:
            likely += instead  # slower ones, for cards that can't run the first
        runnable = (tactic for tactic in dict.fromkeys(likely) if self.why_not_tactic(problem, tactic, bucket, device) is None)
        return list(itertools.islice(runnable, _MOST_TACTICS))

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
        fields = {name for name, _ in tactic.params}
        known = (_DECODE_FIELDS, _SORTED_FIELDS, _SPECIALISED_FIELDS)
        if fields not in known:
            return f"{tactic} has parameters {sorted(fields)}; known are {' or '.join(str(sorted(names)) for names in known)}"
        try:
            plan = _plan(tactic)
        except TypeError as error:
            return str(error)
        from moe_dist_kernels import Limits, SpecialisedPlan

        if isinstance(plan, SpecialisedPlan) and device.type == "cpu" and _interpreting():
            return "warp-specialised kernels can't be interpreted"
        return plan.why_not(_shape(problem, num_local=1, mapped=False), Limits.of(device))

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        from moe_dist_kernels import scratch

        experts = max(1, len(problem.local_experts(0)))  # rank 0 holds the most
        layout = scratch(_shape(problem, num_local=experts, mapped=False), _plan(tactic), num_tokens, routed=problem.routed)
        return Workspace(layout.nbytes)

    def compile_ahead(self, layer: BoundLayer, tactics: Sequence[Tactic], how: CompileAhead) -> int:
        device = layer.weights.w13.device
        if device.type != "cuda":
            return 0
        from moe_dist_kernels import ahead

        router = None if layer.problem.routed else _router(layer.problem, torch.float32)  # as probes bring logits
        shape, pdl = _bound_shape(layer), _uses_pdl(layer)
        done = ahead.compile_ahead(
            [ahead.Variant(shape=shape, plan=_plan(tactic), pdl=pdl, router=router) for tactic in tactics],
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
        pdl, shape, plan = _uses_pdl(layer), _bound_shape(layer), _plan(tactic)
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


def _number(tactic: Tactic, name: str) -> int:
    value: Scalar = tactic[name]
    if type(value) is not int:
        raise TypeError(f"{name} of {tactic} is {value!r}; it must be an integer")
    return value


def _flag(tactic: Tactic, name: str) -> bool:
    value: Scalar = tactic[name]
    if type(value) is not bool:
        raise TypeError(f"{name} of {tactic} is {value!r}; it must be a bool")
    return value


def _plan(tactic: Tactic) -> Plan:
    """The kernels' plan of a tactic with the right fields. TypeError: a parameter of the wrong type."""
    from moe_dist_kernels import DecodePlan, DecodeTile, ProductTile, SortedPlan, SpecialisedPlan

    def small(side: str) -> DecodeTile:
        return DecodeTile(
            block_n=_number(tactic, f"{side}_n"),
            block_k=_number(tactic, f"{side}_k"),
            warps=_number(tactic, f"{side}_warps"),
            early=_number(tactic, "down_early") if side == "down" else 0,
        )

    def product(side: str) -> ProductTile:
        return ProductTile(
            block_n=_number(tactic, f"{side}_n"),
            block_k=_number(tactic, f"{side}_k"),
            warps=_number(tactic, f"{side}_warps"),
            stages=_number(tactic, f"{side}_stages"),
            tma=_flag(tactic, f"{side}_tma"),
            persistent=_flag(tactic, f"{side}_persistent"),
        )

    fields = {name for name, _ in tactic.params}
    if tactic["path"] == "decode" and fields == _DECODE_FIELDS:
        return DecodePlan(up=small("up"), down=small("down"))
    if tactic["path"] == "specialised" and fields == _SPECIALISED_FIELDS:
        return SpecialisedPlan(group_m=_number(tactic, "group_m"), gather=_flag(tactic, "gather"))
    if tactic["path"] != "sorted" or fields != _SORTED_FIELDS:
        raise TypeError(
            f"path of {tactic} is {tactic['path']!r}; it must be 'decode', 'sorted' or 'specialised', with that path's parameters"
        )
    return SortedPlan(
        block_m=_number(tactic, "block_m"),
        group_m=_number(tactic, "group_m"),
        swap_ab=_flag(tactic, "swap_ab"),
        up=product("up"),
        down=product("down"),
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
        ahead.Variant(shape=shape, plan=plan, pdl=True) for tactic in tactics if (plan := _plan(tactic)).why_not(shape, limits) is None
    ]
    rows, work = [], list(ahead.distinct(variants, ahead.target_for(arch)).values())
    for variant, name in work:
        launch = variant.launches()[name]
        given = [param for param in launch.params if param is not None]
        descriptors = sum(isinstance(param, Descriptor) for param in given)
        named = {"arch": arch, "kernel": launch.kernel.__name__, "launch": name, "arguments": len(given), "descriptors": descriptors}
        rows.append({**named, **launch.constants, "warps": launch.num_warps, "stages": launch.num_stages})
    return rows, work


# What follows was read off an H200 (docs/kernels.md has the rounds). "Rows" are the rows of one expert when routing is even.


def _rows_per_expert(problem: MoEProblem, num_tokens: int) -> float:
    routing = problem.config.routing
    return num_tokens * routing.slots / routing.total_experts


def _defaults(problem: MoEProblem, bucket: Bucket) -> list[Tactic]:
    """The untuned choice and what replaces it where it can't run, in order."""
    rows = _rows_per_expert(problem, bucket.high)
    fp8 = problem.config.quant.weight == "fp8"
    small_depth = problem.local_intermediate <= 256
    # At one token no expert is hit twice: two launches take no longer than the sorted path's five, at half the host's cost.
    if fp8 and (bucket.high == 1 or ((bucket.high <= 4 or rows <= 0.05) and problem.local_intermediate <= 1024)):
        up = (1, 512, 1) if small_depth or bucket.high == 1 else (2, 512, 1)
        return [_decode(up, (4, 256, 1) if small_depth or bucket.high > 1 else (2, 512, 1), early=2)]
    if not fp8 and (bucket.high <= 4 or rows <= 0.2):
        wide = problem.local_intermediate >= 2048
        return [_decode((1, 2048, 4) if wide else (1, 1024, 1), (4, 256, 1) if small_depth or wide else (2, 512, 2), early=2)]
    found = [tactic for limit, tactics in (_FP8 if fp8 else _PLAIN) if rows <= limit for tactic in tactics]
    # A copy of the rows in order pays when they are read often: once for every 128 columns of the activation.
    ways = (_specialised(gather=False), _specialised(gather=True))
    return [tactic for tactic in found if tactic not in ways or tactic == ways[problem.local_intermediate < 512 or rows <= 100]]


# By rows at most: the default first, then what takes its place on cards or shapes without the copy engine.
_PLAIN: tuple[tuple[float, tuple[Tactic, ...]], ...] = (
    (8, (_sorted(16, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), swap_ab=True), _sorted(16, (32, 64, 4, 3, ""), (64, 64, 4, 3, "")))),
    (28, (_sorted(32, (64, 128, 4, 3, "t"), (128, 64, 4, 4, "t")), _sorted(32, (64, 128, 4, 3, ""), (128, 64, 4, 4, "")))),
    (
        40,
        (
            _sorted(64, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8),
            _sorted(64, (64, 64, 4, 4, ""), (128, 64, 4, 4, ""), group_m=8),
        ),
    ),
    (
        float("inf"),
        (
            _sorted(128, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8),
            _sorted(128, (128, 64, 8, 4, ""), (256, 64, 8, 4, ""), group_m=8),
            _sorted(64, (64, 32, 4, 3, ""), (128, 32, 4, 3, ""), group_m=8),
        ),
    ),
)
_FP8: tuple[tuple[float, tuple[Tactic, ...]], ...] = (
    (
        8,
        (
            _sorted(16, (64, 128, 4, 5, ""), (128, 64, 4, 6, "t"), swap_ab=True),
            _sorted(16, (64, 128, 4, 4, ""), (128, 64, 4, 4, ""), swap_ab=True),
        ),
    ),
    (
        24,
        (
            _sorted(32, (64, 128, 4, 4, "t"), (128, 64, 4, 6, "t"), swap_ab=True),
            _sorted(32, (64, 128, 4, 4, ""), (128, 64, 4, 4, ""), swap_ab=True),
        ),
    ),
    (
        50,
        (
            _sorted(64, (64, 128, 4, 4, "t"), (128, 64, 4, 5, "t"), group_m=8),
            _sorted(64, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), group_m=8),
        ),
    ),
    (
        float("inf"),
        (
            _specialised(gather=False),
            _specialised(gather=True),
            _sorted(64, (128, 128, 8, 4, "t"), (128, 128, 4, 3, "t"), group_m=8),
            _sorted(64, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), group_m=8),
        ),
    ),
)


def _worth_timing(problem: MoEProblem, bucket: Bucket) -> Iterator[Tactic]:
    """Tactics beside the default, the likely ones first."""
    slots = bucket.high * problem.config.routing.slots
    rows = _rows_per_expert(problem, bucket.high)
    if problem.config.quant.weight == "fp8":
        yield from _worth_timing_fp8(slots, rows)
    else:
        yield from _worth_timing_plain(slots, rows)


def _worth_timing_plain(slots: int, rows: float) -> Iterator[Tactic]:
    if slots <= 160 and rows <= 2:
        downs = ((2, 512, 2), (4, 256, 1), (2, 256, 1))
        for small_up in ((1, 1024, 1), (1, 2048, 1), (1, 2048, 4))[: 3 if slots <= 40 else 2]:
            for small_down in downs:
                yield _decode(small_up, small_down, early=2)
        for early in (0, 4) if slots <= 40 else (0,):
            for small_down in downs:
                yield _decode((1, 1024, 1), small_down, early=early)
        if slots <= 40:
            yield _decode((1, 2048, 4), (2, 256, 1))
    if rows <= 20:
        for down in ((128, 128, 4, 3, ""), (128, 64, 4, 4, ""), (64, 128, 4, 5, "t")):
            yield _sorted(16, (64, 128, 4, 3, ""), down, swap_ab=True)
        for down in ((128, 128, 4, 3, ""), (128, 128, 4, 2, ""), (128, 64, 4, 2, "")):
            yield _sorted(16, (32, 128, 4, 4, ""), down, swap_ab=True)
        yield _sorted(16, (64, 128, 4, 4, ""), (64, 128, 4, 3, ""), swap_ab=True)
        yield _sorted(16, (64, 128, 4, 4, "t"), (128, 64, 4, 6, "t"), swap_ab=True)
    if 3 < rows <= 70:
        yield _sorted(32, (64, 128, 4, 3, "t"), (128, 64, 4, 4, "t"))
        yield _sorted(32, (64, 128, 4, 4, "t"), (128, 128, 4, 4, "t"), swap_ab=True)
        yield _sorted(32, (64, 64, 4, 4, "t"), (128, 64, 4, 4, "t"), swap_ab=True)
    if 12 <= rows <= 300:
        yield _sorted(64, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8)
        yield _sorted(64, (64, 64, 4, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8)
        yield _sorted(64, (64, 64, 4, 4, "t"), (128, 64, 4, 4, "t"), group_m=8)
    if rows > 28:
        for group_m in (8, 16):
            yield _specialised(gather=True, group_m=group_m)
        for down in ((256, 64, 8, 4, "tp"), (256, 64, 8, 3, "tp")):
            yield _sorted(128, (128, 64, 8, 4, "t"), down, group_m=8)
        yield _sorted(128, (128, 64, 8, 4, "t"), (256, 64, 8, 3, "tp"), group_m=16)
    if 28 < rows <= 512:
        yield _sorted(128, (128, 64, 8, 3, "tp"), (256, 64, 8, 4, "tp"), group_m=8)
        yield _sorted(128, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "t"), group_m=8)


def _worth_timing_fp8(slots: int, rows: float) -> Iterator[Tactic]:
    if slots <= 160 and rows <= 2:
        for small_up in ((1, 512, 1), (2, 512, 1)):
            for small_down in ((2, 512, 1), (4, 256, 1), (2, 256, 1))[: 3 if slots <= 40 else 2]:
                for early in (2, 4) if slots <= 40 else (2,):
                    yield _decode(small_up, small_down, early=early)
            yield _decode(small_up, (2, 256, 1) if slots <= 10 else (4, 256, 1))
    if rows <= 20:
        for up in ((64, 128, 4, 5, ""), (128, 128, 4, 4, "t")):
            for down in ((128, 64, 4, 6, "t"), (64, 128, 4, 6, "t")):
                yield _sorted(16, up, down, swap_ab=True)
        yield _sorted(16, (128, 128, 4, 4, ""), (128, 128, 4, 5, "t"), swap_ab=True)
    if 3 < rows <= 70:
        yield _sorted(32, (64, 128, 4, 4, "t"), (128, 64, 4, 6, "t"), swap_ab=True)
        for down in ((128, 64, 4, 6, "t"), (128, 128, 4, 5, "t")):
            yield _sorted(32, (128, 128, 8, 4, "t"), down, swap_ab=True)
    if rows >= 12:
        for gather in (False, True):
            yield _specialised(gather=gather)
        yield _sorted(64, (64, 128, 4, 4, "t"), (128, 64, 4, 5, "t"), group_m=8)
        yield _sorted(64, (128, 128, 8, 4, "t"), (128, 128, 4, 3, "t"), group_m=8)
    if 12 <= rows <= 100:
        yield _sorted(64, (64, 128, 4, 3, "t"), (128, 64, 4, 5, "t"), group_m=8)
        yield _sorted(64, (64, 128, 4, 4, "t"), (64, 64, 4, 6, "t"), group_m=8)
        for down in ((128, 128, 4, 4, "t"), (128, 64, 4, 5, "t")):
            yield _sorted(64, (128, 128, 8, 4, "t"), down, group_m=8)
