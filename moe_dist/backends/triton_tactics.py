"""The tactics of backend `triton`: their names, which are worth timing for a bucket, which run untuned, and the kernels' plan of each.

Pure: asks no device and launches nothing; which of them can run is `triton.py`'s to say, which alone imports this, and tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_dist.backends.base import MoEProblem
from moe_dist.tuning.problem import Bucket, Scalar, Tactic

if TYPE_CHECKING:
    from moe_dist_kernels import Plan

_TILE_FIELDS = {"path", *(f"{side}_{name}" for side in ("up", "down") for name in ("n", "k", "warps"))}
DECODE_FIELDS = {*_TILE_FIELDS, "down_early"}
SORTED_FIELDS = {
    "block_m",
    "group_m",
    "swap_ab",
    *(f"{side}_{name}" for side in ("up", "down") for name in ("stages", "tma", "persistent")),
}
SORTED_FIELDS |= _TILE_FIELDS
SPECIALISED_FIELDS = {"path", "group_m", "gather"}

_Small = tuple[int, int, int]  # columns, depth, warps
_Product = tuple[int, int, int, int, str]  # columns, depth, warps, stages; "t": by the copy engine, "p": persistent


def decode_tiles(up: _Small, down: _Small, *, early: int = 0) -> Tactic:
    """The small path. early: steps of the second product whose weights are asked for before the first is done."""
    params: dict[str, Scalar] = {"path": "decode", "down_early": early}
    for side, tile in (("up", up), ("down", down)):
        params |= {f"{side}_{name}": value for name, value in zip(("n", "k", "warps"), tile, strict=True)}
    return Tactic("triton", tuple(sorted(params.items())))


def sorted_tiles(block_m: int, up: _Product, down: _Product, *, group_m: int = 1, swap_ab: bool = False) -> Tactic:
    """The sorted path."""
    params: dict[str, Scalar] = {"path": "sorted", "block_m": block_m, "group_m": group_m, "swap_ab": swap_ab}
    for side, tile in (("up", up), ("down", down)):
        params |= {f"{side}_{name}": value for name, value in zip(("n", "k", "warps", "stages"), tile[:4], strict=True)}
        params |= {f"{side}_tma": "t" in tile[4], f"{side}_persistent": "p" in tile[4]}
    return Tactic("triton", tuple(sorted(params.items())))


def specialised(*, gather: bool, group_m: int = 8) -> Tactic:
    """The sorted path with warp-specialised products."""
    return Tactic.of("triton", path="specialised", group_m=group_m, gather=gather)


# One family for batch invariance: whatever the batch, a row meets the same instructions in the same order.
INVARIANT = sorted_tiles(64, (64, 64, 4, 4, ""), (128, 64, 4, 4, ""), group_m=8)
# Runs everywhere that Triton does, in any dtype, within the 99 KB of shared memory that the smallest cards give.
SMALL_CARD = sorted_tiles(32, (32, 32, 4, 3, ""), (64, 32, 4, 3, ""), group_m=8)


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


def plan_of(tactic: Tactic) -> Plan:
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
    if tactic["path"] == "decode" and fields == DECODE_FIELDS:
        return DecodePlan(up=small("up"), down=small("down"))
    if tactic["path"] == "specialised" and fields == SPECIALISED_FIELDS:
        return SpecialisedPlan(group_m=_number(tactic, "group_m"), gather=_flag(tactic, "gather"))
    if tactic["path"] != "sorted" or fields != SORTED_FIELDS:
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


# What follows was read off an H200 (docs/kernels.md has the rounds). "Rows" are the rows of one expert when routing is even.


def _rows_per_expert(problem: MoEProblem, num_tokens: int) -> float:
    routing = problem.config.routing
    return num_tokens * routing.slots / routing.total_experts


def defaults(problem: MoEProblem, bucket: Bucket) -> list[Tactic]:
    """The untuned choice and what replaces it where it can't run, in order."""
    rows = _rows_per_expert(problem, bucket.high)
    fp8 = problem.config.quant.weight == "fp8"
    small_depth = problem.local_intermediate <= 256
    # At one token no expert is hit twice: two launches take no longer than the sorted path's five, at half the host's cost.
    if fp8 and (bucket.high == 1 or ((bucket.high <= 4 or rows <= 0.05) and problem.local_intermediate <= 1024)):
        up = (1, 512, 1) if small_depth or bucket.high == 1 else (2, 512, 1)
        return [decode_tiles(up, (4, 256, 1) if small_depth or bucket.high > 1 else (2, 512, 1), early=2)]
    if not fp8 and (bucket.high <= 4 or rows <= 0.2):
        wide = problem.local_intermediate >= 2048
        return [decode_tiles((1, 2048, 4) if wide else (1, 1024, 1), (4, 256, 1) if small_depth or wide else (2, 512, 2), early=2)]
    found = [tactic for limit, tactics in (_FP8 if fp8 else _PLAIN) if rows <= limit for tactic in tactics]
    # A copy of the rows in order pays when they are read often: once for every 128 columns of the activation.
    ways = (specialised(gather=False), specialised(gather=True))
    return [tactic for tactic in found if tactic not in ways or tactic == ways[problem.local_intermediate < 512 or rows <= 100]]


# By rows at most: the default first, then what takes its place on cards or shapes without the copy engine.
_PLAIN: tuple[tuple[float, tuple[Tactic, ...]], ...] = (
    (
        8,
        (
            sorted_tiles(16, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), swap_ab=True),
            sorted_tiles(16, (32, 64, 4, 3, ""), (64, 64, 4, 3, "")),
        ),
    ),
    (28, (sorted_tiles(32, (64, 128, 4, 3, "t"), (128, 64, 4, 4, "t")), sorted_tiles(32, (64, 128, 4, 3, ""), (128, 64, 4, 4, "")))),
    (
        40,
        (
            sorted_tiles(64, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8),
            sorted_tiles(64, (64, 64, 4, 4, ""), (128, 64, 4, 4, ""), group_m=8),
        ),
    ),
    (
        float("inf"),
        (
            sorted_tiles(128, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8),
            sorted_tiles(128, (128, 64, 8, 4, ""), (256, 64, 8, 4, ""), group_m=8),
            sorted_tiles(64, (64, 32, 4, 3, ""), (128, 32, 4, 3, ""), group_m=8),
        ),
    ),
)
_FP8: tuple[tuple[float, tuple[Tactic, ...]], ...] = (
    (
        8,
        (
            sorted_tiles(16, (64, 128, 4, 5, ""), (128, 64, 4, 6, "t"), swap_ab=True),
            sorted_tiles(16, (64, 128, 4, 4, ""), (128, 64, 4, 4, ""), swap_ab=True),
        ),
    ),
    (
        24,
        (
            sorted_tiles(32, (64, 128, 4, 4, "t"), (128, 64, 4, 6, "t"), swap_ab=True),
            sorted_tiles(32, (64, 128, 4, 4, ""), (128, 64, 4, 4, ""), swap_ab=True),
        ),
    ),
    (
        50,
        (
            sorted_tiles(64, (64, 128, 4, 4, "t"), (128, 64, 4, 5, "t"), group_m=8),
            sorted_tiles(64, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), group_m=8),
        ),
    ),
    (
        float("inf"),
        (
            specialised(gather=False),
            specialised(gather=True),
            sorted_tiles(64, (128, 128, 8, 4, "t"), (128, 128, 4, 3, "t"), group_m=8),
            sorted_tiles(64, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), group_m=8),
        ),
    ),
)


def worth_timing(problem: MoEProblem, bucket: Bucket) -> Iterator[Tactic]:
    """Tactics beside the default, the likely ones first."""
    slots = bucket.high * problem.config.routing.slots
    rows = _rows_per_expert(problem, bucket.high)
    if problem.config.quant.weight == "fp8":
        yield from _worth_timing_fp8(slots, rows)
    else:
        yield from _worth_timing_plain(problem.local_intermediate, slots, rows)


def _worth_timing_plain(intermediate: int, slots: int, rows: float) -> Iterator[Tactic]:
    if slots <= 160 and rows <= 2:
        downs = ((2, 512, 2), (4, 256, 1), (2, 256, 1))
        for small_up in ((1, 1024, 1), (1, 2048, 1), (1, 2048, 4))[: 3 if slots <= 40 else 2]:
            for small_down in downs:
                yield decode_tiles(small_up, small_down, early=2)
        for early in (0, 4) if slots <= 40 else (0,):
            for small_down in downs:
                yield decode_tiles((1, 1024, 1), small_down, early=early)
        if slots <= 40:
            yield decode_tiles((1, 2048, 4), (2, 256, 1))
    if rows <= 20:
        for down in ((128, 128, 4, 3, ""), (128, 64, 4, 4, ""), (64, 128, 4, 5, "t")):
            yield sorted_tiles(16, (64, 128, 4, 3, ""), down, swap_ab=True)
        for down in ((128, 128, 4, 3, ""), (128, 128, 4, 2, ""), (128, 64, 4, 2, "")):
            yield sorted_tiles(16, (32, 128, 4, 4, ""), down, swap_ab=True)
        yield sorted_tiles(16, (64, 128, 4, 4, ""), (64, 128, 4, 3, ""), swap_ab=True)
        yield sorted_tiles(16, (64, 128, 4, 4, "t"), (128, 64, 4, 6, "t"), swap_ab=True)
    if 3 < rows <= 70:
        yield sorted_tiles(32, (64, 128, 4, 3, "t"), (128, 64, 4, 4, "t"))
        yield sorted_tiles(32, (64, 128, 4, 4, "t"), (128, 128, 4, 4, "t"), swap_ab=True)
        yield sorted_tiles(32, (64, 64, 4, 4, "t"), (128, 64, 4, 4, "t"), swap_ab=True)
    if 12 <= rows <= 300:
        yield sorted_tiles(64, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8)
        yield sorted_tiles(64, (64, 64, 4, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8)
        yield sorted_tiles(64, (64, 64, 4, 4, "t"), (128, 64, 4, 4, "t"), group_m=8)
    if rows > 28:
        for group_m in (8, 16):
            yield specialised(gather=True, group_m=group_m)
        for down in ((256, 64, 8, 4, "tp"), (256, 64, 8, 3, "tp")):
            yield sorted_tiles(128, (128, 64, 8, 4, "t"), down, group_m=8)
        yield sorted_tiles(128, (128, 64, 8, 4, "t"), (256, 64, 8, 3, "tp"), group_m=16)
    if 28 < rows <= 512:
        yield sorted_tiles(128, (128, 64, 8, 3, "tp"), (256, 64, 8, 4, "tp"), group_m=8)
        yield sorted_tiles(128, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "t"), group_m=8)
    if rows > 512 and 0 < intermediate % 128 <= 64:  # tiles of 128 columns multiply for nothing beyond the experts' width
        yield sorted_tiles(128, (64, 64, 4, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8)


def _worth_timing_fp8(slots: int, rows: float) -> Iterator[Tactic]:
    if slots <= 160 and rows <= 2:
        for small_up in ((1, 512, 1), (2, 512, 1)):
            for small_down in ((2, 512, 1), (4, 256, 1), (2, 256, 1))[: 3 if slots <= 40 else 2]:
                for early in (2, 4) if slots <= 40 else (2,):
                    yield decode_tiles(small_up, small_down, early=early)
            yield decode_tiles(small_up, (2, 256, 1) if slots <= 10 else (4, 256, 1))
    if rows <= 20:
        for up in ((64, 128, 4, 5, ""), (128, 128, 4, 4, "t")):
            for down in ((128, 64, 4, 6, "t"), (64, 128, 4, 6, "t")):
                yield sorted_tiles(16, up, down, swap_ab=True)
        yield sorted_tiles(16, (128, 128, 4, 4, ""), (128, 128, 4, 5, "t"), swap_ab=True)
    if 3 < rows <= 70:
        yield sorted_tiles(32, (64, 128, 4, 4, "t"), (128, 64, 4, 6, "t"), swap_ab=True)
        for down in ((128, 64, 4, 6, "t"), (128, 128, 4, 5, "t")):
            yield sorted_tiles(32, (128, 128, 8, 4, "t"), down, swap_ab=True)
    if rows >= 12:
        for gather in (False, True):
            yield specialised(gather=gather)
        yield sorted_tiles(64, (64, 128, 4, 4, "t"), (128, 64, 4, 5, "t"), group_m=8)
        yield sorted_tiles(64, (128, 128, 8, 4, "t"), (128, 128, 4, 3, "t"), group_m=8)
    if 12 <= rows <= 100:
        yield sorted_tiles(64, (64, 128, 4, 3, "t"), (128, 64, 4, 5, "t"), group_m=8)
        yield sorted_tiles(64, (64, 128, 4, 4, "t"), (64, 64, 4, 6, "t"), group_m=8)
        for down in ((128, 128, 4, 4, "t"), (128, 64, 4, 5, "t")):
            yield sorted_tiles(64, (128, 128, 8, 4, "t"), down, group_m=8)
