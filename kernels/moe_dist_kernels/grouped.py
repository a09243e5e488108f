"""The two grouped products over sorted rows: tensor-core tiles, one expert a tile, no padding of rows in memory.

Legend: T tokens, K slots of a token, S = T * K, E local experts, H hidden, I local intermediate; up: the first product
(with the gate where there is one), down: the second. Weights are read in the checkpoint's layout, [E, 2I or I, H] and
[E, H, I], and never written. Gate and up rows of the same columns lie in one tile and one matrix product. Offsets inside
one expert are 32 bits wide; between experts and rows they are 64.

fp8: weights with one fp32 scale a 128 x 128 block, rows with one scale a group of columns: 128 for hidden states, the up
tile's block_n for what lies between the products. A product over one scale block is added to the fp32 sum as a whole.
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
from moe_dist_kernels.launch import Descriptor, Launch

SCALE_BLOCK = 128  # rows and columns of a weight that share one fp8 scale, and columns of a hidden state
FP8_MAX = 448.0


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
def _accumulate(
    a_ptrs,
    a_desc,
    a_row,
    a_scale_ptrs,
    w_ptrs,
    w_desc,
    w_plane,
    w_row,
    w_scale_ptr,
    w_scale_up_ptr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLANES: tl.constexpr,
    A_GROUP: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """fp32 [BLOCK_M, PLANES * BLOCK_N] (transposed if SWAP_AB): rows times weights over DEPTH, scaled by blocks for fp8."""
    WIDE: tl.constexpr = PLANES * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    lane_n = tl.arange(0, WIDE)
    if SWAP_AB:
        acc = tl.zeros([WIDE, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, WIDE], dtype=tl.float32)
    if w_scale_ptr is not None:
        a_scale_next = tl.load(a_scale_ptrs)
        w_scale_next = tl.load(w_scale_ptr)
        w_scale_up_next = tl.load(w_scale_up_ptr)
    for at in range(0, DEPTH, BLOCK_K):
        if a_desc is not None:
            a = a_desc.load([a_row, at])
        elif DEPTH % BLOCK_K == 0:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k < DEPTH - at)[None, :], other=0.0)
        if w_desc is not None:
            w = tl.reshape(w_desc.load([w_plane, w_row, at]), [WIDE, BLOCK_K])
        elif DEPTH % BLOCK_K == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(k < DEPTH - at)[None, :], other=0.0)
        if w_scale_ptr is None:
            if SWAP_AB:
                acc = tl.dot(w, a.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
        else:
            a_scale, w_scale, w_scale_up = a_scale_next, w_scale_next, w_scale_up_next
            following = tl.minimum(at + BLOCK_K, DEPTH - 1)  # asked for one step ahead, off the product's critical path
            a_scale_next = tl.load(a_scale_ptrs + following // A_GROUP)
            w_scale_next = tl.load(w_scale_ptr + following // 128)
            w_scale_up_next = tl.load(w_scale_up_ptr + following // 128)
            scale = a_scale * w_scale  # one factor a row, or two: for the gate's columns and for up's
            scale_up = a_scale * w_scale_up
            if SWAP_AB:
                part = tl.dot(w, a.T)
                if PLANES == 1:
                    acc += part * scale[None, :]
                else:
                    acc += part * tl.where(lane_n[:, None] < BLOCK_N, scale[None, :], scale_up[None, :])
            else:
                part = tl.dot(a, w.T)
                if PLANES == 1:
                    acc += part * scale[:, None]
                else:
                    acc += part * tl.where(lane_n[None, :] < BLOCK_N, scale[:, None], scale_up[:, None])
        if a_desc is None:
            a_ptrs += BLOCK_K
        if w_desc is None:
            w_ptrs += BLOCK_K
    return acc


@triton.jit
def _up_tile(
    pid,
    num_tiles,
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_desc,
    w_scale_ptr,
    bias_ptr,
    row_weights_ptr,
    slots_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    act_ptr,
    act_scale_ptr,
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
):
    PLANES: tl.constexpr = 2 if GATED else 1
    COLUMNS: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    K_BLOCKS: tl.constexpr = (HIDDEN + 127) // 128
    tile, column = _tile(pid, num_tiles, COLUMNS, GROUP_M)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    first_row = tl.load(tile_row_ptr + tile)
    rows = tl.load(tile_rows_ptr + tile)
    lane_m = tl.arange(0, BLOCK_M)
    live = lane_m < rows
    row = first_row + tl.where(live, lane_m, 0)  # dead lanes repeat the first row: always there, never stored
    slot = tl.load(slots_ptr + row)
    token = (slot // TOP_K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    lane_n = tl.arange(0, PLANES * BLOCK_N)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptrs = w_ptr
    if w_desc is None:
        weight_row = (lane_n // BLOCK_N) * INTER + tl.minimum(column * BLOCK_N + lane_n % BLOCK_N, INTER - 1)
        w_ptrs = w_ptr + expert * (PLANES * INTER * HIDDEN) + weight_row[:, None] * HIDDEN + k[None, :]
    scale_ptrs = x_scale_ptr
    gate_scale_ptr = w_scale_ptr
    up_scale_ptr = w_scale_ptr
    if w_scale_ptr is not None:
        scale_ptrs = x_scale_ptr + token * K_BLOCKS
        SCALE_ROWS: tl.constexpr = (PLANES * INTER + 127) // 128
        gate_scale_ptr = w_scale_ptr + (expert * SCALE_ROWS + column * BLOCK_N // 128) * K_BLOCKS
        up_scale_ptr = gate_scale_ptr + ((PLANES - 1) * INTER // 128) * K_BLOCKS
    acc = _accumulate(
        x_ptr + token[:, None] * HIDDEN + k[None, :],
        None,
        first_row,
        scale_ptrs,
        w_ptrs,
        w_desc,
        expert.to(tl.int32) * PLANES,
        column * BLOCK_N,
        gate_scale_ptr,
        up_scale_ptr,
        HIDDEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PLANES,
        128,
        SWAP_AB,
        PRECISION,
    )
    if SWAP_AB:
        acc = acc.T
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + slot)[:, None]
    if bias_ptr is not None:
        weight_row = (lane_n // BLOCK_N) * INTER + tl.minimum(column * BLOCK_N + lane_n % BLOCK_N, INTER - 1)
        acc += tl.load(bias_ptr + expert * (PLANES * INTER) + weight_row).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
    else:
        gate = acc
        up = acc
    out = activate(gate, up, KIND, LIMIT, ALPHA, BETA)
    if act_scale_ptr is not None:
        out = tl.where((n < INTER)[None, :], out, 0.0)
        scale = tl.maximum(tl.max(tl.abs(out), axis=1), 1e-10) / 448.0
        out = out / scale[:, None]
        tl.store(act_scale_ptr + row.to(tl.int64) * COLUMNS + column, scale, mask=live)
    act_ptrs = act_ptr + row.to(tl.int64)[:, None] * INTER + n[None, :]
    tl.store(act_ptrs, out.to(act_ptr.dtype.element_ty), mask=live[:, None] & (n < INTER)[None, :])


@triton.jit(do_not_specialize_on_alignment=["row_weights_ptr", "bias_ptr", "w_scale_ptr"])
def up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_desc,
    w_scale_ptr,
    bias_ptr,
    row_weights_ptr,
    slots_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    act_ptr,
    act_scale_ptr,
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
    PERSISTENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[row] = activation(x[slots[row] // TOP_K] @ w[expert].T + bias), BLOCK_M rows by BLOCK_N columns a tile.

    Weights come through w_ptr or, by the copy engine, through w_desc ([E * planes, I, H] in blocks [planes, BLOCK_N, BLOCK_K]).
    row_weights (fp32 [S], by slot) multiplies the expert's input: on the products, before the bias; None: it does not.
    Example, H = 2, I = 1, silu without gate: x [1, 2], w [[3, 4]] give silu(11) = 10.9998.
    """
    COLUMNS: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.load(num_tiles_ptr)
    if PERSISTENT:
        for pid in tl.range(tl.program_id(0), num_tiles * COLUMNS, tl.num_programs(0), flatten=True):
            _up_tile(
                pid, num_tiles, x_ptr, x_scale_ptr, w_ptr, w_desc, w_scale_ptr, bias_ptr, row_weights_ptr, slots_ptr,
                tile_expert_ptr, tile_row_ptr, tile_rows_ptr, act_ptr, act_scale_ptr, HIDDEN, INTER, TOP_K, KIND, LIMIT,
                ALPHA, BETA, GATED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAP_AB, PRECISION,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles * COLUMNS:
        _up_tile(
            tl.program_id(0), num_tiles, x_ptr, x_scale_ptr, w_ptr, w_desc, w_scale_ptr, bias_ptr, row_weights_ptr, slots_ptr,
            tile_expert_ptr, tile_row_ptr, tile_rows_ptr, act_ptr, act_scale_ptr, HIDDEN, INTER, TOP_K, KIND, LIMIT,
            ALPHA, BETA, GATED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAP_AB, PRECISION,
        )  # fmt: skip


@triton.jit
def _down_tile(
    pid,
    num_tiles,
    act_ptr,
    act_desc,
    act_scale_ptr,
    w_ptr,
    w_desc,
    w_scale_ptr,
    bias_ptr,
    row_weights_ptr,
    slots_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    y_ptr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    A_GROUP: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr,
):
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    K_BLOCKS: tl.constexpr = (INTER + 127) // 128
    tile, column = _tile(pid, num_tiles, COLUMNS, GROUP_M)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    first_row = tl.load(tile_row_ptr + tile)
    rows = tl.load(tile_rows_ptr + tile)
    lane_m = tl.arange(0, BLOCK_M)
    live = lane_m < rows
    row = first_row + tl.where(live, lane_m, 0)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, HIDDEN - 1)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = act_ptr
    if act_desc is None:
        a_ptrs = act_ptr + row.to(tl.int64)[:, None] * INTER + k[None, :]
    w_ptrs = w_ptr
    if w_desc is None:
        w_ptrs = w_ptr + expert * (HIDDEN * INTER) + weight_row[:, None] * INTER + k[None, :]
    a_scale_ptrs = act_scale_ptr
    scale_ptr = w_scale_ptr
    if w_scale_ptr is not None:
        a_scale_ptrs = act_scale_ptr + row.to(tl.int64) * ((INTER + A_GROUP - 1) // A_GROUP)
        scale_ptr = w_scale_ptr + (expert * ((HIDDEN + 127) // 128) + column * BLOCK_N // 128) * K_BLOCKS
    acc = _accumulate(
        a_ptrs,
        act_desc,
        first_row,
        a_scale_ptrs,
        w_ptrs,
        w_desc,
        expert.to(tl.int32),
        column * BLOCK_N,
        scale_ptr,
        scale_ptr,
        INTER,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        1,
        A_GROUP,
        SWAP_AB,
        PRECISION,
    )
    if SWAP_AB:
        acc = acc.T
    slot = tl.load(slots_ptr + row)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * HIDDEN + weight_row).to(tl.float32)[None, :]
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + slot)[:, None]
    y_ptrs = y_ptr + slot.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=live[:, None] & (n < HIDDEN)[None, :])


@triton.jit(do_not_specialize_on_alignment=["row_weights_ptr", "bias_ptr", "w_scale_ptr"])
def down_kernel(
    act_ptr,
    act_desc,
    act_scale_ptr,
    w_ptr,
    w_desc,
    w_scale_ptr,
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
    A_GROUP: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[slots[row]] = row_weights[slot] * (act[row] @ w[expert].T + bias); row_weights None: 1.

    The copy engine brings rows through act_desc ([S, I] in blocks [BLOCK_M, BLOCK_K]) and weights through w_desc ([E, H, I] in
    blocks [1, BLOCK_N, BLOCK_K]). Example, I = 2, H = 1: act [1, 2], w [[3, 4]], bias 1, weight 0.5 give 0.5 * (11 + 1) = 6.
    """
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.load(num_tiles_ptr)
    if PERSISTENT:
        for pid in tl.range(tl.program_id(0), num_tiles * COLUMNS, tl.num_programs(0), flatten=True):
            _down_tile(
                pid, num_tiles, act_ptr, act_desc, act_scale_ptr, w_ptr, w_desc, w_scale_ptr, bias_ptr, row_weights_ptr, slots_ptr,
                tile_expert_ptr, tile_row_ptr, tile_rows_ptr, y_ptr, HIDDEN, INTER, BLOCK_M, BLOCK_N, BLOCK_K, A_GROUP, GROUP_M,
                SWAP_AB, PRECISION,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles * COLUMNS:
        _down_tile(
            tl.program_id(0), num_tiles, act_ptr, act_desc, act_scale_ptr, w_ptr, w_desc, w_scale_ptr, bias_ptr, row_weights_ptr,
            slots_ptr, tile_expert_ptr, tile_row_ptr, tile_rows_ptr, y_ptr, HIDDEN, INTER, BLOCK_M, BLOCK_N, BLOCK_K, A_GROUP,
            GROUP_M, SWAP_AB, PRECISION,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTile:
    """How one grouped product is cut: columns and depth of a tile, warps, pipeline stages.

    tma: the copy engine brings weights (and, in the second product, rows) in. persistent: a fixed number of programs walk
    all tiles, so that one tile's end overlaps the next one's start; else one program a tile.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool = False
    persistent: bool = False

    def shared_bytes(self, *, block_m: int, planes: int, itemsize: int) -> int:
        """Shared memory of the pipeline: `stages` copies of a row tile and of `planes` weight tiles, and, if persistent, what
        one tile's results pass through while the next tile's operands arrive."""
        pipeline = self.stages * self.block_k * itemsize * (block_m + planes * self.block_n)
        return pipeline + (block_m * self.block_n * (2 if itemsize == 1 else 1) if self.persistent else 0)

    def why_not(self, *, block_m: int, planes: int, itemsize: int, depth: int, fp8: bool, shared_limit: int, has_tma: bool) -> str | None:
        """The reason that this tile can't run, or None. depth: columns of the weights. shared_limit: bytes of shared memory
        that one block may take. has_tma: compute capability 9.0 or later. itemsize: of the operands."""
        for name, value in (("block_m", block_m), ("block_n", self.block_n), ("block_k", self.block_k)):
            if value < 16 or value & (value - 1):
                return f"{name} {value} must be a power of two of at least 16, the smallest side of a tensor-core tile"
        if self.warps not in (4, 8):
            return f"warps {self.warps} must be 4 or 8: one or two warpgroups"
        if not 1 <= self.stages <= 8:
            return f"stages {self.stages} must be 1 to 8"
        need = self.shared_bytes(block_m=block_m, planes=planes, itemsize=itemsize)
        if need > shared_limit:
            return f"the pipeline needs {need} bytes of shared memory, a block has {shared_limit}; take fewer stages or smaller blocks"
        registers = block_m * self.block_n * planes // (self.warps * 32) * (2 if fp8 else 1)  # fp8: the sum and one block's product
        if registers > 160:
            return f"{registers} accumulator registers a thread leave too few of 255; take more warps or a smaller block"
        if fp8 and (self.block_n > SCALE_BLOCK or self.block_k > SCALE_BLOCK):
            return f"block_n {self.block_n} and block_k {self.block_k} must lie inside one {SCALE_BLOCK} x {SCALE_BLOCK} scale block"
        if self.tma and not has_tma:
            return "the copy engine needs compute capability 9.0"
        if self.tma and depth * itemsize % 16:
            return f"rows of {depth} x {itemsize} bytes are no multiple of the 16 bytes that the copy engine moves"
        if self.tma and self.block_k * itemsize > 128 * 2:
            return f"block_k {self.block_k} is {self.block_k * itemsize} bytes; the copy engine's tiles are kept to 256"
        return None


def product_launches(
    *,
    dtype: torch.dtype,
    fp8: bool,
    hidden: int,
    inter: int,
    top_k: int,
    activation: dict[str, Any],
    up_bias: torch.dtype | None,
    down_bias: torch.dtype | None,
    weight_on_input: bool,
    up: ProductTile,
    down: ProductTile,
    block_m: int,
    group_m: int,
    swap_ab: bool,
    pdl: bool,
) -> dict[str, Launch]:
    """ "up" over max_tiles * ceil(I / block_n) programs, "down" over max_tiles * ceil(H / block_n); fewer if persistent.

    activation: KIND, LIMIT, ALPHA, BETA, GATED of `activate`.
    """
    operand = torch.float8_e4m3fn if fp8 else dtype
    scale = torch.float32 if fp8 else None
    ints = (torch.int32,) * 5
    sizes: dict[str, Any] = {"HIDDEN": hidden, "INTER": inter, "BLOCK_M": block_m, "GROUP_M": group_m, "SWAP_AB": swap_ab, "PDL": pdl}
    sizes["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"

    def by(tile: ProductTile, *block: int) -> tuple[torch.dtype | None, Descriptor | None]:
        """An operand's pointer or its descriptor."""
        return (None, Descriptor(operand, block)) if tile.tma else (operand, None)

    def launch(kernel: Any, tile: ProductTile, params: tuple[Any, ...], **more: Any) -> Launch:
        cut = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "PERSISTENT": tile.persistent}
        return Launch(kernel, params, sizes | cut | more, num_warps=tile.warps, num_stages=tile.stages, pdl=pdl)

    planes = 2 if activation["GATED"] else 1
    weighted = (torch.float32, None) if weight_on_input else (None, torch.float32)
    up_weights = (*by(up, planes, up.block_n, up.block_k), scale)
    rows = (*by(down, block_m, down.block_k), scale)
    down_weights = (*by(down, 1, down.block_n, down.block_k), scale)
    return {
        "up": launch(up_kernel, up, (operand, scale, *up_weights, up_bias, weighted[0], *ints, operand, scale), TOP_K=top_k, **activation),
        # The first product leaves one scale for its tile's columns.
        "down": launch(down_kernel, down, (*rows, *down_weights, down_bias, weighted[1], *ints, dtype), A_GROUP=up.block_n),
    }
