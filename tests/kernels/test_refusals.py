"""What is refused before anything is launched, with value and limit: sizes that offsets can't hold, tiles that scales can't, tensors that don't fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_dist_kernels import Experts, ExpertsShape, Limits, ProductTile, SortedPlan, is_interpreted
from moe_dist_kernels.experts import MAX_SLOTS

pytestmark = pytest.mark.skipif(is_interpreted(), reason="as a GPU's process binds them")

SHAPE = ExpertsShape(dtype=torch.float32, hidden=16, inter=16, slots=2, num_local=2, map_size=None, kind="swiglu")
TILE = ProductTile(block_n=64, block_k=64, warps=4, stages=2)
PLAN = SortedPlan(block_m=16, group_m=1, swap_ab=False, up=TILE, down=TILE)


def layer_of(**changed: torch.Tensor) -> Experts:
    given = {"w13": torch.zeros(2, 32, 16), "w2": torch.zeros(2, 16, 16)} | changed
    return Experts(SHAPE, PLAN, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("inter", "refused"), [(2**14, True), (2**14 - 1, False)])
def test_an_expert_s_weights_are_within_31_bits(inter: int, refused: bool) -> None:
    """2 x 2^14 x 2^16 is 2^31, one more than the last offset."""
    reason = dataclasses.replace(SHAPE, hidden=2**16, inter=inter).why_not()
    assert (reason is not None) == refused
    assert reason is None or "32768 x 65536 weights; offsets inside an expert are 32 bits wide" in reason


def test_slots_are_counted_in_31_bits() -> None:
    """Of a view of one row, so that nothing is held."""
    layer, tokens = layer_of(), MAX_SLOTS // 2 + 1
    x = torch.zeros(1, 16).expand(tokens, 16)
    with pytest.raises(ValueError, match=f"{tokens} tokens of 2 slots exceed {MAX_SLOTS} slots; split the batch"):
        layer(x, x)


@pytest.mark.parametrize(
    ("up", "down", "reason"),
    [
        ({"block_n": 64}, {"block_k": 128}, "block_k 128 spans several of the fp8 scales that the up product makes, one for 64 columns"),
        ({"block_n": 256, "warps": 8}, {}, "block_n 256 and block_k 64 must lie inside one 128 x 128 scale block"),
        ({}, {"block_k": 256}, "block_n 64 and block_k 256 must lie inside one 128 x 128 scale block"),
    ],
)
def test_fp8_tiles_lie_within_their_scales(up: dict[str, int], down: dict[str, int], reason: str) -> None:
    shape = ExpertsShape(dtype=torch.bfloat16, hidden=256, inter=256, slots=2, num_local=2, map_size=None, kind="silu", fp8=True)
    plan = dataclasses.replace(PLAN, up=dataclasses.replace(TILE, **up), down=dataclasses.replace(TILE, **down))  # type: ignore[arg-type]
    assert reason in str(plan.why_not(shape, Limits()))
    assert PLAN.why_not(shape, Limits()) is None


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "w2",
            torch.zeros(2, 16, 16, dtype=torch.float16),
            r"w2 is \(2, 16, 16\) torch.float16 on cpu.*must be \(2, 16, 16\) torch.float32",
        ),
        ("w2", torch.zeros(2, 16, 16, device="meta"), "w2 is .* on meta, contiguous; it must be .* on cpu"),
        ("w13", torch.zeros(2 * 32 * 16 + 1)[1:].view(2, 32, 16), "w13 and w2 must start at a multiple of 16 bytes"),
        ("w2", torch.zeros(2 * 16 * 16 + 1)[1:].view(2, 16, 16), "w13 and w2 must start at a multiple of 16 bytes"),
    ],
)
def test_weights_that_kernels_would_misread_are_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(**{name: tensor})


def test_ids_of_each_width_have_launches_of_their_own() -> None:
    layer = layer_of()
    kinds = [layer.launchers(dtype)["finalize"].params[1] for dtype in (torch.int32, torch.int64, torch.int32)]
    assert kinds == [torch.int32, torch.int64, torch.int32]
