"""Offsets past 2^31 elements, without the memory: a kernel gets pointers that lie as far before a small tensor as the offset that it must reach.

An offset that is reckoned in 32 bits lands elsewhere, where nothing is mapped, and ends the process. On a card `test_on_gpu.py` has real tensors.
"""

from __future__ import annotations

import builtins
import os
from typing import Any

import pytest
import torch
from moe_dist_kernels.align import CHUNK, Align, Ids
from moe_dist_kernels.decode import DecodeTile, decode_launches
from moe_dist_kernels.finalize import finalize_launches
from moe_dist_kernels.grouped import ProductTile, product_launches
from moe_dist_kernels.launch import Launch
from moe_dist_kernels.quantise import quantise_launch
from moe_dist_kernels.routing import route_launch
from triton.runtime import interpreter
from truth import experts_truth, relative_error

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="one program of a grid, by the interpreter's own loop")

EXPERT, SLOT, ROW = 2**29 + 3, 2**30 + 5, 2**30 + 9  # each times anything below is past 2^31
HIDDEN, INTER = 384, 256  # three scale blocks and two
SILU = {"KIND": "silu", "LIMIT": None, "ALPHA": 1.0, "BETA": 0.0, "GATED": False}


class Before:
    """A pointer `elements` before the start of `tensor`."""

    def __init__(self, tensor: torch.Tensor, elements: int) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype
        self.address = (tensor.data_ptr() - elements * tensor.element_size()) % 2**64

    def data_ptr(self) -> int:
        return self.address


def launch_one(launch: Launch, program: int, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Program `program` alone of a grid of 2^31 - 1."""
    grid = 2**31 - 1
    with monkeypatch.context() as patch:
        patch.setattr(
            interpreter.GridExecutor, "_init_args_hst", lambda self, arguments, named: (arguments, named)
        )  # they lie there already
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
        patch.setattr(interpreter, "range", lambda *n: [program] if n == (grid,) else builtins.range(*n), raising=False)
        launch(grid, 0, 0, *arguments)


def weights(fp8: bool, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(weights of one expert, their scales, what they mean)."""
    plain = torch.randn(1, rows, columns) * 0.2
    if not fp8:
        return plain, None, plain
    held, scale = plain.to(torch.float8_e4m3fn), torch.rand(1, rows // 128, columns // 128) + 0.5
    return held, scale, held.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


def before(tensor: torch.Tensor | None, elements: int) -> Before | None:
    return None if tensor is None else Before(tensor, elements)


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_products_of_sorted_rows(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile with one row: row ROW of the sorted order, slot SLOT, expert EXPERT; every column block of both products."""
    torch.manual_seed(0)
    tile = ProductTile(block_n=128, block_k=128, warps=4, stages=2)
    made = product_launches(
        dtype=torch.float32, fp8=fp8, hidden=HIDDEN, inter=INTER, top_k=1, activation=SILU, up_bias=torch.float32, down_bias=torch.float32,
        weight_on_input=False, up=tile, down=tile, block_m=16, group_m=1, swap_ab=False, pdl=False,
    )  # fmt: skip
    (w13, s13, up), (w2, s2, down) = weights(fp8, INTER, HIDDEN), weights(fp8, HIDDEN, INTER)
    bias, bias_2 = torch.randn(1, INTER), torch.randn(1, HIDDEN)
    x, y, weight = torch.randn(1, HIDDEN), torch.full((1, HIDDEN), torch.nan), torch.tensor([0.5])
    rows, x_scale = x, None
    if fp8:
        x_scale = x.view(3, 128).abs().amax(1) / 448
        rows = (x.view(3, 128) / x_scale[:, None]).view(1, HIDDEN).to(torch.float8_e4m3fn)
    act = torch.full((1, INTER), torch.nan).to(torch.float8_e4m3fn if fp8 else torch.float32)
    act_scale = torch.full((2,), torch.nan) if fp8 else None
    one = [torch.tensor([value], dtype=torch.int32) for value in (SLOT, EXPERT, ROW, 1, 1)]
    tiles = (Before(one[0], ROW), *one[1:])
    acts = before(act, ROW * INTER), before(act_scale, ROW * 2)
    scales = before(s13, EXPERT * 6), before(s2, EXPERT * 6)
    arguments = (
        before(rows, SLOT * HIDDEN), before(x_scale, SLOT * 3), before(w13, EXPERT * INTER * HIDDEN), None, scales[0],
        before(bias, EXPERT * INTER), None, *tiles, *acts,
    )  # fmt: skip
    for column in range(INTER // 128):
        launch_one(made["up"], column, arguments, monkeypatch)
    arguments = (
        acts[0], None, acts[1], before(w2, EXPERT * HIDDEN * INTER), None, scales[1], before(bias_2, EXPERT * HIDDEN), before(weight, SLOT),
        *tiles, before(y, SLOT * HIDDEN),
    )  # fmt: skip
    for column in range(HIDDEN // 128):
        launch_one(made["down"], column, arguments, monkeypatch)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    truth = experts_truth(x, up, down, ids, weight[None], kind="silu", w13_bias=bias, w2_bias=bias_2)
    assert relative_error(y, truth[0]) < (0.12 if fp8 else 1e-5)


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_products_of_a_few_tokens(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both slots of a token near the 2^29th, which has the expert EXPERT twice."""
    torch.manual_seed(0)
    token = 2**29 - 64
    slot, slots, tokens = 2 * token, 2**30 - 64, 2**29 - 32
    tile = DecodeTile(block_n=128, block_k=128, warps=8)
    made = decode_launches(
        dtype=torch.float32, fp8=fp8, ids=Ids(dtype=torch.int32, num_local=EXPERT + 1, map_size=None), hidden=HIDDEN, inter=INTER, top_k=2, slots=2,
        activation=SILU, up_bias=torch.float32, down_bias=torch.float32, weight_on_input=False, up=tile, down=tile, pdl=False,
    )  # fmt: skip
    (w13, s13, up), (w2, s2, down) = weights(fp8, INTER, HIDDEN), weights(fp8, HIDDEN, INTER)
    bias, bias_2 = torch.randn(1, INTER), torch.randn(1, HIDDEN)
    x, act, out = torch.randn(1, HIDDEN), torch.full((2, INTER), torch.nan), torch.full((1, HIDDEN), torch.nan)
    ids, weight = torch.tensor([[EXPERT, EXPERT]], dtype=torch.int32), torch.tensor([[0.5, 2.0]])
    chosen, acts = (Before(ids, slot), None), Before(act, slot * INTER)
    arguments: tuple[Any, ...] = (
        Before(x, token * HIDDEN), Before(w13, EXPERT * INTER * HIDDEN), before(s13, EXPERT * 6), Before(bias, EXPERT * INTER), None,
        *chosen, acts, slots,
    )  # fmt: skip
    for program in (slot, slot + 1, slots + slot, slots + slot + 1):
        launch_one(made["up"], program, arguments, monkeypatch)
    arguments = (
        acts, Before(w2, EXPERT * HIDDEN * INTER), before(s2, EXPERT * 6), Before(bias_2, EXPERT * HIDDEN), Before(weight, slot), *chosen,
        Before(out, token * HIDDEN), tokens,
    )  # fmt: skip
    for column in range(HIDDEN // 128):
        launch_one(made["down"], column * tokens + token, arguments, monkeypatch)
    truth = experts_truth(x, up, down, torch.zeros(1, 2, dtype=torch.int32), weight, kind="silu", w13_bias=bias, w2_bias=bias_2).sum(1)
    assert relative_error(out, truth) < 1e-5


def test_rows_before_and_after_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of token 2^29 + 5 with two slots, the second remote: quantised, finished, and, unfinished, its remote slot made zero."""
    torch.manual_seed(0)
    token = 2**29 + 5
    ids = torch.tensor([[1, -1]], dtype=torch.int32)
    y, out, zeroed = torch.randn(1, 2, HIDDEN), torch.full((1, HIDDEN), torch.nan), torch.full((1, 2, HIDDEN), 7.0)
    kind = Ids(dtype=torch.int32, num_local=4, map_size=None)
    made = finalize_launches(dtype=torch.float32, ids=kind, hidden=HIDDEN, top_k=2, pdl=False)
    at = Before(ids, 2 * token), None
    launch_one(made["finalize"], token, (Before(y, 2 * token * HIDDEN), *at, Before(out, token * HIDDEN), token + 1), monkeypatch)
    assert torch.equal(out, y[:, 0])
    for slot in (2 * token, 2 * token + 1):
        launch_one(made["zero_remote"], slot, (*at, Before(zeroed, 2 * token * HIDDEN), 2 * token + 2), monkeypatch)
    assert torch.equal(zeroed, torch.tensor([7.0, 0.0])[None, :, None].expand(1, 2, HIDDEN))

    x, q, scale = torch.randn(1, HIDDEN), torch.zeros(1, HIDDEN).to(torch.float8_e4m3fn), torch.full((3,), torch.nan)
    token = 2**30 + 5
    launch = quantise_launch(dtype=torch.float32, hidden=HIDDEN, pdl=False)
    launch_one(launch, token, (Before(x, token * HIDDEN), Before(q, token * HIDDEN), Before(scale, token * 3), token + 1), monkeypatch)
    torch.testing.assert_close(scale, x.view(3, 128).abs().amax(1) / 448)
    assert relative_error(q.float().view(3, 128) * scale[:, None], x.view(3, 128)) < 0.07


def test_routing_and_counts_of_the_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    token = 2**30 + 5
    logits, ids, chosen = torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.full((1, 3), -7, dtype=torch.int32), torch.full((1, 3), torch.nan)
    route = route_launch(
        logits_dtype=torch.float32, num_experts=4, top_k=3, n_group=None, topk_group=None, num_shared=0, scoring="sigmoid", renormalize=True, scale=1.0,
        bias=False, pdl=False,
    )  # fmt: skip
    launch_one(route, token, (Before(logits, token * 4), None, Before(ids, token * 3), Before(chosen, token * 3), token + 1), monkeypatch)
    assert ids.tolist() == [[1, 3, 2]]
    assert float(chosen.sum()) == pytest.approx(1.0)

    chunk, experts = 2**20 - 8, 2**12  # counts lie 2^32 elements on
    held, counts = torch.full((CHUNK,), 5, dtype=torch.int32), torch.full((experts,), -7, dtype=torch.int32)
    count = Align(ids=Ids(dtype=torch.int32, num_local=experts, map_size=None), block_m=16, pdl=False).count
    launch_one(count, chunk, (Before(held, chunk * CHUNK), None, Before(counts, chunk * experts), chunk * CHUNK + 100), monkeypatch)
    assert counts.nonzero().tolist() == [[5]]
    assert int(counts[5]) == 100
