"""The path for a few tokens: no sort, no tensor cores, two launches that do nothing but stream the weights of the slots hit.

Legend as in grouped.py. A program of the first product owns a few columns of one slot; a program of the second owns a
few columns of one token and sums all its slots in registers, so nothing is left to finalize.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from moe_dist_kernels.activation import activate
from moe_dist_kernels.align import Ids, local_expert
from moe_dist_kernels.launch import INT, Launch


@triton.jit
def _row_chunk(ptr, at, limit, BLOCK_K: tl.constexpr, FP8: tl.constexpr):
    """fp32 [BLOCK_K]: elements at .. at + BLOCK_K of a row, zeros past `limit`.

    Laid over threads as the weights are: a 16-byte load holds 16 fp8 weights but only 8 elements of a 16-bit row.
    """
    if FP8:
        group = tl.arange(0, BLOCK_K // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
        low = tl.load(ptr + at + group, mask=group < limit - at, other=0.0)
        high = tl.load(ptr + at + group + 8, mask=group + 8 < limit - at, other=0.0)
        row = tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [BLOCK_K])
    else:
        k = tl.arange(0, BLOCK_K)
        row = tl.load(ptr + at + k, mask=k < limit - at, other=0.0)
    return row.to(tl.float32)


@triton.jit
def _scale_chunk(ptr, at, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp32 [BLOCK_K]: the weights' scales of columns at .. at + BLOCK_K, one load for 16 of them."""
    K_BLOCKS: tl.constexpr = (DEPTH + 127) // 128
    group = tl.arange(0, BLOCK_K // 16)
    scale = tl.load(ptr + tl.minimum((at + group * 16) // 128, K_BLOCKS - 1))
    return tl.reshape(tl.broadcast_to(scale[:, None], [BLOCK_K // 16, 16]), [BLOCK_K])


@triton.jit(
    do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr", "row_weights_ptr", "bias_ptr", "w_scale_ptr"]
)
def decode_up_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    row_weights_ptr,
    ids_ptr,
    map_ptr,
    act_ptr,
    num_slots,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[slot] = activation(x[slot // TOP_K] @ w[expert of slot].T + bias), BLOCK_N columns a program; remote slots: nothing.

    Slots are the fastest axis of the grid, so that slots of one expert read its weights at the same time.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(0) % num_slots
    expert = local_expert(ids_ptr, map_ptr, slot, True, NUM_LOCAL, MAP_SIZE, "").to(tl.int64)
    if expert < 0:
        return
    n = (tl.program_id(0) // num_slots) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, INTER - 1)
    k = tl.arange(0, BLOCK_K)
    WEIGHT_ROWS: tl.constexpr = 2 * INTER if GATED else INTER
    w_ptr += expert * (WEIGHT_ROWS * HIDDEN)
    x_ptr += (slot // TOP_K).to(tl.int64) * HIDDEN
    w_ptrs = w_ptr + weight_row[:, None] * HIDDEN + k[None, :]
    FP8: tl.constexpr = w_scale_ptr is not None
    scale_ptr = w_scale_ptr
    up_scale_ptr = w_scale_ptr
    if FP8:  # one scale for all rows of the program, one a 128 columns
        K_BLOCKS: tl.constexpr = (HIDDEN + 127) // 128
        row_block = (tl.program_id(0) // num_slots) * BLOCK_N // 128
        scale_ptr = w_scale_ptr + (expert * ((WEIGHT_ROWS + 127) // 128) + row_block) * K_BLOCKS
        up_scale_ptr = scale_ptr + ((WEIGHT_ROWS - INTER) // 128) * K_BLOCKS
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for at in tl.static_range(0, HIDDEN, BLOCK_K):
        x = _row_chunk(x_ptr, at, HIDDEN, BLOCK_K, FP8)
        x_gate = x
        if at + BLOCK_K <= HIDDEN:
            w_up = tl.load(w_ptrs + at + (INTER * HIDDEN if GATED else 0))
            if GATED:
                w_gate = tl.load(w_ptrs + at)
        else:
            inside = k < HIDDEN - at
            w_up = tl.load(w_ptrs + at + (INTER * HIDDEN if GATED else 0), mask=inside[None, :], other=0.0)
            if GATED:
                w_gate = tl.load(w_ptrs + at, mask=inside[None, :], other=0.0)
        if FP8:
            if GATED:
                x_gate = x * _scale_chunk(scale_ptr, at, HIDDEN, BLOCK_K)
            x = x * _scale_chunk(up_scale_ptr, at, HIDDEN, BLOCK_K)
        up += w_up.to(tl.float32) * x[None, :]
        if GATED:
            gate += w_gate.to(tl.float32) * x_gate[None, :]
    up_sum = tl.sum(up, axis=1)
    gate_sum = up_sum
    if GATED:
        gate_sum = tl.sum(gate, axis=1)
    if row_weights_ptr is not None:
        scale = tl.load(row_weights_ptr + slot)
        up_sum *= scale
        gate_sum *= scale
    if bias_ptr is not None:
        bias_ptr += expert * WEIGHT_ROWS
        up_sum += tl.load(bias_ptr + (INTER if GATED else 0) + weight_row).to(tl.float32)
        if GATED:
            gate_sum += tl.load(bias_ptr + weight_row).to(tl.float32)
    out = activate(gate_sum, up_sum, KIND, LIMIT, ALPHA, BETA)
    tl.store(act_ptr + slot.to(tl.int64) * INTER + n, out.to(act_ptr.dtype.element_ty), mask=n < INTER)


@triton.jit(
    do_not_specialize=["num_outputs"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr", "row_weights_ptr", "bias_ptr", "w_scale_ptr"]
)
def decode_down_kernel(
    act_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    row_weights_ptr,
    ids_ptr,
    map_ptr,
    out_ptr,
    num_outputs,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i] = sum over the SLOTS slots of output i, in order, of weight * (act @ w[expert].T + bias); remote slots add 0.

    SLOTS is K for finished rows, 1 for unfinalized ones. Example, two slots with act 1 and 2, w 3 and 4, weights 0.5 and 0.25:
    0.5 * 3 + 0.25 * 8 = 3.5.

    The weights of the first EARLY steps are asked for before the first product is done. Ids, map and weights are there by then: all of
    that product's programs have waited for what precedes it before any program of this one starts.
    """
    n = (tl.program_id(0) // num_outputs) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, HIDDEN - 1)
    output = (tl.program_id(0) % num_outputs).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    STEPS: tl.constexpr = (INTER + BLOCK_K - 1) // BLOCK_K  # of a slot
    held = ()
    if PDL:
        for step in tl.static_range(EARLY):
            # Past the first cache level, which may remember what another call found there.
            expert = local_expert(ids_ptr, map_ptr, output * SLOTS + step // STEPS, True, NUM_LOCAL, MAP_SIZE, ".cg").to(tl.int64)
            depth = tl.where(expert >= 0, INTER, 0) - step % STEPS * BLOCK_K
            w_ptrs = w_ptr + tl.where(expert >= 0, expert, 0) * (HIDDEN * INTER) + weight_row[:, None] * INTER + k[None, :]
            held = held + (tl.load(w_ptrs + step % STEPS * BLOCK_K, mask=(k < depth)[None, :], other=0.0),)  # noqa: RUF005 -- no stars
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    FP8: tl.constexpr = w_scale_ptr is not None
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    bias = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i in tl.static_range(SLOTS):
        slot = output * SLOTS + i
        expert = local_expert(ids_ptr, map_ptr, slot, True, NUM_LOCAL, MAP_SIZE, "").to(tl.int64)
        here = expert >= 0
        weight = 1.0
        if row_weights_ptr is not None:
            weight = tl.load(row_weights_ptr + slot)
        depth = tl.where(here, INTER, 0)  # a remote slot has no columns: nothing of it is read
        row = tl.where(here, expert, 0)
        w_ptrs = w_ptr + row * (HIDDEN * INTER) + weight_row[:, None] * INTER + k[None, :]
        scale_ptr = w_scale_ptr
        if FP8:
            row_block = (tl.program_id(0) // num_outputs) * BLOCK_N // 128
            scale_ptr = w_scale_ptr + (row * ((HIDDEN + 127) // 128) + row_block) * ((INTER + 127) // 128)
        for at in tl.static_range(0, INTER, BLOCK_K):
            act = _row_chunk(act_ptr + slot * INTER, at, depth, BLOCK_K, FP8) * weight
            if FP8:
                act *= _scale_chunk(scale_ptr, at, INTER, BLOCK_K)
            if PDL and i * STEPS + at // BLOCK_K < EARLY:
                w = held[i * STEPS + at // BLOCK_K]
            else:
                w = tl.load(w_ptrs + at, mask=(k < depth - at)[None, :], other=0.0)
            acc += w.to(tl.float32) * act[None, :]
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + row * HIDDEN + weight_row, mask=n < tl.where(here, HIDDEN, 0), other=0.0).to(tl.float32) * weight
    out = tl.sum(acc, axis=1) + bias
    tl.store(out_ptr + output * HIDDEN + n, out.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """How one product of the small path is cut: columns and depth of a program's step, and its warps.

    early: steps of the second product whose weights are asked for before the first is done, where launches may overlap.
    """

    block_n: int
    block_k: int
    warps: int
    early: int = 0

    def why_not(self) -> str | None:
        """The reason that this tile can't run, or None."""
        if self.block_n > 128:
            return f"block_n {self.block_n} is past the 128 rows that share an fp8 scale, and past what a program has registers for"
        if self.block_n < 1 or self.block_n & (self.block_n - 1) or self.block_k < 16 or self.block_k & (self.block_k - 1):
            return f"block_n {self.block_n} and block_k {self.block_k} must be powers of two, block_k at least 16"
        if self.warps not in (1, 2, 4, 8):
            return f"warps {self.warps} must be 1, 2, 4 or 8"
        if self.block_n * self.block_k > self.warps * 32 * 64:
            return f"a step of {self.block_n} x {self.block_k} leaves too few registers for {self.warps} warps; take a smaller step"
        most = self.warps * 32 * 128 // (self.block_n * self.block_k)
        if not 0 <= self.early <= most:
            return f"early {self.early} must be 0 to {most}: steps of {self.block_n} x {self.block_k} that {self.warps} warps can hold"
        return None


def decode_launches(
    *,
    dtype: torch.dtype,
    fp8: bool,
    ids: Ids,
    hidden: int,
    inter: int,
    top_k: int,
    slots: int,
    activation: dict[str, Any],
    up_bias: torch.dtype | None,
    down_bias: torch.dtype | None,
    weight_on_input: bool,
    up: DecodeTile,
    down: DecodeTile,
    pdl: bool,
) -> dict[str, Launch]:
    """ "up": grid S * ceil(I / block_n); arguments x, w13, its scales or None, bias, weights or None, ids, map or None, act, S. "down":
    grid outputs * ceil(H / block_n), outputs T (slots K) or S (slots 1); arguments act, w2, the same, out, outputs."""
    sizes = {"HIDDEN": hidden, "INTER": inter, **ids.constants, "PDL": pdl}
    weights = (torch.float8_e4m3fn, torch.float32) if fp8 else (dtype, None)

    def launch(kernel: Any, tile: DecodeTile, bias: torch.dtype | None, weighted: bool, **more: Any) -> Launch:
        params = (dtype, *weights, bias, torch.float32 if weighted else None, *ids.params, dtype, INT)
        cut: dict[str, Any] = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        return Launch(kernel, params, sizes | cut | more, num_warps=tile.warps, pdl=pdl)

    return {
        "up": launch(decode_up_kernel, up, up_bias, weight_on_input, TOP_K=top_k, **activation),
        "down": launch(
            decode_down_kernel, down, down_bias, not weight_on_input, SLOTS=slots, EARLY=min(down.early, slots * -(-inter // down.block_k))
        ),
    }
