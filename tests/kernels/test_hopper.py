"""The warp-specialised products on a card that has their instructions; without one they are compiled only (test_compile.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_dist_kernels import Experts, ExpertsShape, SpecialisedPlan
from truth import experts_truth, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="written in the instructions of compute capability 9.0",
    ),
]


def drawn(
    tokens: int, experts: int, top_k: int, hidden: int, inter: int, *, gather: bool, finalize: bool, fp8: bool = True
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """One random layer and its tokens, the last of them with a remote slot: a run of it on a poisoned output, and fp32 truth on the CPU."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    held = torch.float8_e4m3fn if fp8 else torch.bfloat16
    w13 = (torch.randn(experts, 2 * inter, hidden, device="cuda") * 0.2).to(held)
    w2 = (torch.randn(experts, hidden, inter, device="cuda") * 0.2).to(held)
    s13 = torch.rand(experts, 2 * inter // 128, hidden // 128, device="cuda") + 0.5 if fp8 else None
    s2 = torch.rand(experts, hidden // 128, inter // 128, device="cuda") + 0.5 if fp8 else None
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().cuda()
    ids[-1, 0] = -1
    weights = torch.rand(tokens, top_k, device="cuda")
    shape = ExpertsShape(
        dtype=torch.bfloat16,
        hidden=hidden,
        inter=inter,
        slots=top_k,
        num_local=experts,
        map_size=None,
        kind="swiglu",
        limit=6.0,
        finalize=finalize,
        fp8=fp8,
    )
    layer = Experts(shape, SpecialisedPlan(group_m=8, gather=gather), w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)

    def run() -> torch.Tensor:
        out = torch.full((tokens, hidden) if finalize else (tokens, top_k, hidden), torch.nan, device="cuda", dtype=torch.bfloat16)
        layer(x, out, ids=ids, weights=weights)
        return out

    def plain(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return w.float().cpu()
        return (w.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).cpu()

    def truth() -> torch.Tensor:
        y = experts_truth(x.cpu(), plain(w13, s13), plain(w2, s2), ids.cpu(), weights.cpu(), kind="swiglu", limit=6.0)
        return y.sum(1) if finalize else y

    return run, truth


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inter"),
    [
        (384, 256),  # three scale blocks deep, the second product two; half of its last tile's columns are past the end
        (1024, 896),  # deep enough that tiles are taken from a counter
    ],
)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "finalize"),
    [
        (1, 4, 2, True),  # one row a tile, most of the 128 dead
        (300, 3, 2, True),  # full and partial tiles of an expert, more tiles than one group of eight
        (3000, 8, 2, True),  # several tiles a program
        (40, 60, 8, False),  # remote slots' rows must be zeros; tiles of a few rows alone
    ],
)
def test_warp_specialised_products(tokens: int, experts: int, top_k: int, finalize: bool, hidden: int, inter: int, gather: bool) -> None:
    """Bits equal from run to run, and as near to truth as fp8 rows allow; a row of remote ids stays zero."""
    run, truth = drawn(tokens, experts, top_k, hidden, inter, gather=gather, finalize=finalize)
    outs = [run().cpu() for _ in range(2)]
    assert torch.equal(outs[0], outs[1])
    if not finalize:
        assert torch.equal(outs[0][-1, 0], torch.zeros(hidden, dtype=torch.bfloat16))
    assert relative_error(outs[0], truth()) < 0.08


@pytest.mark.parametrize(
    ("hidden", "inter"),
    [
        (384, 200),  # six steps deep, then three and an eighth; a tile of the activation that is half past the end, and one of w2 too
        (1024, 896),  # deep enough that tiles are taken from a counter
    ],
)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "finalize"), [(1, 4, 2, True), (300, 3, 2, True), (3000, 8, 2, True), (40, 60, 8, False)]
)
def test_warp_specialised_products_of_16_bits(tokens: int, experts: int, top_k: int, finalize: bool, hidden: int, inter: int) -> None:
    """As above, and as near to truth as bf16 activations allow."""
    run, truth = drawn(tokens, experts, top_k, hidden, inter, gather=True, finalize=finalize, fp8=False)
    outs = [run().cpu() for _ in range(2)]
    assert torch.equal(outs[0], outs[1])
    if not finalize:
        assert torch.equal(outs[0][-1, 0], torch.zeros(hidden, dtype=torch.bfloat16))
    assert relative_error(outs[0], truth()) < 0.01


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("gather", "fp8"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("hidden", [384, 1024])  # the first product in fixed steps; its tiles from a counter
@pytest.mark.parametrize(
    ("tokens", "experts"),
    [
        (40, 60),  # 5 rows an expert: 840 tiles of a few rows, so that a program's warpgroups show each other maxima six times
        (340, 16),  # 170 rows an expert: full tiles and tiles of a few rows in turn
    ],
)
def test_same_bits_two_hundred_times(tokens: int, experts: int, hidden: int, gather: bool, fp8: bool) -> None:
    """Whatever else the card does: a stage, a tile's number or a maximum read too early, or overwritten too soon, would differ once."""
    run, truth = drawn(tokens, experts, 8, hidden, 1792, gather=gather, finalize=True, fp8=fp8)
    first = run()
    assert relative_error(first.cpu(), truth()) < 0.08
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    differing = []
    torch.cuda.synchronize()
    for turn in range(200):
        if turn % 2:  # half of the runs share multiprocessors and memory with another kernel, so that warps fall apart otherwise
            with torch.cuda.stream(other):
                _ = noise @ noise
        differing.append((run() != first).sum())
    assert torch.stack(differing).tolist() == [0] * 200
