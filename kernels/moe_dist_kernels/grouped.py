"""The two grouped products over sorted rows: tensor-core tiles, one expert a tile, no padding of rows in memory.

Legend: T tokens, K slots of a token, S = T * K, E local experts, H hidden, I local intermediate; up: the first product
(with the gate where there is one), down: the second. Weights are read in the checkpoint's layout, [E, 2I or I, H] and
[E, H, I], and never written. Offsets inside one expert are 32 bits wide; between experts and rows they are 64.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from moe_dist_kernels.activation import activate
from moe_dist_kernels.launch import Launch


@triton.jit
def _tile(pid, num_tiles, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Row tile and column block of a program: GROUP_M row tiles share their weights in L2 before the next column block."""
    if GROUP_M == 1:
        return pid // COLUMNS, pid % COLUMNS
    per_group = GROUP_M * COLUMNS
    first = (pid // per_group) * GROUP_M
    height = tl.minimum(num_tiles - first, GROUP_M)
    inside = pid % per_group
    return first + inside % height, inside // height


@triton.jit
def _product(a_ptrs, b_ptrs, acc, k_lane, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr, SWAP_AB: tl.constexpr, PRECISION: tl.constexpr):
    for k in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k_lane < DEPTH - k, other=0.0)
            b = tl.load(b_ptrs, mask=k_lane < DEPTH - k, other=0.0)
        if SWAP_AB:
            acc = tl.dot(b, a.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    return acc


@triton.jit(do_not_specialize_on_alignment=["row_weights_ptr", "bias_ptr"])
def up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    row_weights_ptr,
    slots_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    act_ptr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[row] = activation(x[slots[row] // TOP_K] @ w[expert].T + bias), BLOCK_M rows by BLOCK_N columns a program.

    row_weights (fp32 [S], by slot) multiplies the expert's input: on the products, before the bias; None: it does not.
    Example, H = 2, I = 1, silu without gate: x [1, 2], w [[3, 4]] give silu(11) = 10.9998.
    """
    COLUMNS: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.load(num_tiles_ptr)
    if tl.program_id(0) >= num_tiles * COLUMNS:
        return
    tile, column = _tile(tl.program_id(0), num_tiles, COLUMNS, GROUP_M)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    first_row = tl.load(tile_row_ptr + tile)
    rows = tl.load(tile_rows_ptr + tile)
    lane_m = tl.arange(0, BLOCK_M)
    live = lane_m < rows
    row = first_row + tl.where(live, lane_m, 0)  # dead lanes repeat the first row: always there, never stored
    slot = tl.load(slots_ptr + row)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, INTER - 1)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = x_ptr + (slot // TOP_K).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    WEIGHT_ROWS: tl.constexpr = 2 * INTER if GATED else INTER
    w_ptr += expert * (WEIGHT_ROWS * HIDDEN)
    if GATED:
        gate_ptrs = w_ptr + weight_row[:, None] * HIDDEN + k[None, :]
        up_ptrs = gate_ptrs + INTER * HIDDEN
        if SWAP_AB:
            gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        else:
            gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = gate
        for at in range(0, HIDDEN, BLOCK_K):
            if HIDDEN % BLOCK_K == 0:
                a = tl.load(a_ptrs)
                w_gate = tl.load(gate_ptrs)
                w_up = tl.load(up_ptrs)
            else:
                inside = k[None, :] < HIDDEN - at
                a = tl.load(a_ptrs, mask=inside, other=0.0)
                w_gate = tl.load(gate_ptrs, mask=inside, other=0.0)
                w_up = tl.load(up_ptrs, mask=inside, other=0.0)
            if SWAP_AB:
                gate = tl.dot(w_gate, a.T, gate, input_precision=PRECISION)
                up = tl.dot(w_up, a.T, up, input_precision=PRECISION)
            else:
                gate = tl.dot(a, w_gate.T, gate, input_precision=PRECISION)
                up = tl.dot(a, w_up.T, up, input_precision=PRECISION)
            a_ptrs += BLOCK_K
            gate_ptrs += BLOCK_K
            up_ptrs += BLOCK_K
    else:
        if SWAP_AB:
            up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        else:
            up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = _product(a_ptrs, w_ptr + weight_row[:, None] * HIDDEN + k[None, :], up, k[None, :], HIDDEN, BLOCK_K, SWAP_AB, PRECISION)
        gate = up
    if SWAP_AB:
        gate = gate.T
        up = up.T
    if row_weights_ptr is not None:
        scale = tl.load(row_weights_ptr + slot)[:, None]
        up *= scale
        if GATED:
            gate *= scale
    if bias_ptr is not None:
        bias_ptr += expert * WEIGHT_ROWS
        if GATED:
            gate += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + INTER + weight_row).to(tl.float32)[None, :]
        else:
            up += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
    out = activate(gate, up, KIND, LIMIT, ALPHA, BETA).to(act_ptr.dtype.element_ty)
    act_ptrs = act_ptr + row.to(tl.int64)[:, None] * INTER + n[None, :]
    tl.store(act_ptrs, out, mask=live[:, None] & (n < INTER)[None, :])


@triton.jit(do_not_specialize_on_alignment=["row_weights_ptr", "bias_ptr"])
def down_kernel(
    act_ptr,
    w_ptr,
    bias_ptr,
    row_weights_ptr,
    slots_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    y_ptr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[slots[row]] = row_weights[slot] * (act[row] @ w[expert].T + bias); row_weights None: 1.

    Example, I = 2, H = 1: act [1, 2], w [[3, 4]], bias 1, weight 0.5 give 0.5 * (11 + 1) = 6.
    """
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.load(num_tiles_ptr)
    if tl.program_id(0) >= num_tiles * COLUMNS:
        return
    tile, column = _tile(tl.program_id(0), num_tiles, COLUMNS, GROUP_M)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    first_row = tl.load(tile_row_ptr + tile)
    rows = tl.load(tile_rows_ptr + tile)
    lane_m = tl.arange(0, BLOCK_M)
    live = lane_m < rows
    row = first_row + tl.where(live, lane_m, 0)
    slot = tl.load(slots_ptr + row)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, HIDDEN - 1)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = act_ptr + row.to(tl.int64)[:, None] * INTER + k[None, :]
    b_ptrs = w_ptr + expert * (HIDDEN * INTER) + weight_row[:, None] * INTER + k[None, :]
    if SWAP_AB:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc = _product(a_ptrs, b_ptrs, acc, k[None, :], INTER, BLOCK_K, SWAP_AB, PRECISION)
    if SWAP_AB:
        acc = acc.T
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * HIDDEN + weight_row).to(tl.float32)[None, :]
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + slot)[:, None]
    y_ptrs = y_ptr + slot.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=live[:, None] & (n < HIDDEN)[None, :])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTile:
    """How one grouped product is cut: columns and depth of a tile, warps, pipeline stages."""

    block_n: int
    block_k: int
    warps: int
    stages: int

    def shared_bytes(self, *, block_m: int, weight_tiles: int, itemsize: int) -> int:
        """Shared memory of the pipeline: `stages` copies of a row tile and of `weight_tiles` weight tiles."""
        return self.stages * self.block_k * itemsize * (block_m + weight_tiles * self.block_n)

    def why_not(self, *, block_m: int, weight_tiles: int, itemsize: int, shared_limit: int) -> str | None:
        """The reason that this tile can't run, or None. shared_limit: bytes of shared memory that one block may take."""
        for name, value in (("block_m", block_m), ("block_n", self.block_n), ("block_k", self.block_k)):
            if value < 16 or value & (value - 1):
                return f"{name} {value} must be a power of two of at least 16, the smallest side of a tensor-core tile"
        if self.warps not in (4, 8):
            return f"warps {self.warps} must be 4 or 8: one or two warpgroups"
        if not 1 <= self.stages <= 8:
            return f"stages {self.stages} must be 1 to 8"
        need = self.shared_bytes(block_m=block_m, weight_tiles=weight_tiles, itemsize=itemsize)
        if need > shared_limit:
            return f"the pipeline needs {need} bytes of shared memory, a block has {shared_limit}; take fewer stages or smaller blocks"
        registers = block_m * self.block_n * weight_tiles // (self.warps * 32)
        if registers > 160:
            return f"{registers} accumulator registers a thread leave too few of 255; take more warps or a smaller block"
        return None


def up_launch(
    *,
    dtype: torch.dtype,
    hidden: int,
    inter: int,
    top_k: int,
    activation: dict[str, Any],
    bias: torch.dtype | None,
    weight_on_input: bool,
    tile: ProductTile,
    block_m: int,
    group_m: int,
    swap_ab: bool,
    pdl: bool,
) -> Launch:
    """Grid max_tiles * ceil(I / block_n). activation: KIND, LIMIT, ALPHA, BETA, GATED of `activate`."""
    constants = {
        "HIDDEN": hidden,
        "INTER": inter,
        "TOP_K": top_k,
        **activation,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": group_m,
        "SWAP_AB": swap_ab,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PDL": pdl,
    }
    ints = (torch.int32,) * 5
    params = (dtype, dtype, bias, torch.float32 if weight_on_input else None, *ints, dtype)
    return Launch(up_kernel, params, constants, num_warps=tile.warps, num_stages=tile.stages, pdl=pdl)


def down_launch(
    *,
    dtype: torch.dtype,
    hidden: int,
    inter: int,
    bias: torch.dtype | None,
    weight_on_input: bool,
    tile: ProductTile,
    block_m: int,
    group_m: int,
    swap_ab: bool,
    pdl: bool,
) -> Launch:
    """Grid max_tiles * ceil(H / block_n)."""
    constants = {
        "HIDDEN": hidden,
        "INTER": inter,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": group_m,
        "SWAP_AB": swap_ab,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PDL": pdl,
    }
    ints = (torch.int32,) * 5
    params = (dtype, dtype, bias, None if weight_on_input else torch.float32, *ints, dtype)
    return Launch(down_kernel, params, constants, num_warps=tile.warps, num_stages=tile.stages, pdl=pdl)
