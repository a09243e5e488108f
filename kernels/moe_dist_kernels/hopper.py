"""The fp8 products for many rows on Hopper: persistent, warp-specialised, in Gluon.

One warp asks the copy engine for operands, several stages ahead; two warpgroups multiply, 64 rows of a 128-row tile each. A product
over one scale block is added to the fp32 sum while the other warpgroup's product runs. Needs compute capability 9.0 (wgmma); knows
SwiGLU alone and no bias. Imported when such a plan is bound, never before: Gluon is young and absent where it isn't needed.

Rows come sorted and quantised (`scatter_kernel`), so that a tile is one box of memory. Rows past an expert's end are the next
expert's: they are multiplied and never stored. Legend as in grouped.py.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from moe_dist_kernels.launch import INT, Descriptor, Launch

# Its name changed between triton 3.6 and 3.9.
_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

QUANTISE_GROUPS = 8  # scale groups of one program of the scatter
# 12 warps start with 168 registers a thread and share them out anew: 232 for each multiplying warpgroup, 40 for the copying one.
REGISTERS, MULTIPLY_REGISTERS, COPY_REGISTERS = 168, 232, 40


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["weights_ptr"])
def scatter_kernel(
    x_ptr,
    weights_ptr,
    places_ptr,
    q_ptr,
    scale_ptr,
    row_weights_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise each token once (see quantise.py) and copy it, with its weight, to the sorted row of each of its slots.

    places: int32 [S], the row of a slot, -1 for remote ones.
    """
    ALL: tl.constexpr = (HIDDEN + 127) // 128
    BLOCKS: tl.constexpr = (ALL + GROUPS - 1) // GROUPS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    group = block * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + token * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10) / 448.0
    q = (x / scale[:, None]).to(q_ptr.dtype.element_ty)
    for k in tl.static_range(TOP_K):
        row = tl.load(places_ptr + token * TOP_K + k).to(tl.int64)
        if row >= 0:
            tl.store(q_ptr + row * HIDDEN + column, q, mask=column < HIDDEN)
            tl.store(scale_ptr + row * ALL + group, scale, mask=group < ALL)
            if block == 0:
                tl.store(row_weights_ptr + row, tl.load(weights_ptr + token * TOP_K + k))


@gluon.jit
def _place(pid, num_tiles, COLUMNS: gl.constexpr, GROUP_M: gl.constexpr):
    per_group = GROUP_M * COLUMNS
    first = (pid // per_group) * GROUP_M
    height = gl.maximum(gl.minimum(num_tiles - first, GROUP_M), 1)  # without a single tile, tile 0 is looked up and not used
    inside = pid % per_group
    return first + inside % height, inside // height


@gluon.jit
def _copy(
    a_desc,
    b_desc,
    a_bufs,
    b_bufs,
    empty,
    ready,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    COLUMNS: gl.constexpr = (COLS + 127) // 128
    num_tiles = gl.load(num_tiles_ptr)
    step = 0
    for pid in range(gl.program_id(0), num_tiles * COLUMNS, gl.num_programs(0)):
        tile, column = _place(pid, num_tiles, COLUMNS, GROUP_M)
        expert = gl.load(tile_expert_ptr + tile)
        row = gl.load(tile_row_ptr + tile)
        for turn in gl.static_range(PLANES):
            b_row = expert * (PLANES * COLS) + column * 128 + turn * BLOCK_N
            for k in range(0, DEPTH, 128):
                stage = step % STAGES
                bar = ready.index(stage)
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, (128 + 128) * 128)
                _load_box(a_desc, [row, k], bar, a_bufs.index(2 * stage))
                _load_box(a_desc, [row + 64, k], bar, a_bufs.index(2 * stage + 1))
                b = b_bufs.index(stage)
                if PLANES == 2:
                    _load_box(b_desc, [b_row, k], bar, b.slice(0, BLOCK_N, dim=0))
                    _load_box(b_desc, [b_row + COLS, k], bar, b.slice(BLOCK_N, BLOCK_N, dim=0))
                else:
                    _load_box(b_desc, [b_row, k], bar, b)
                step += 1


@gluon.jit
def _multiply(
    half,
    a_bufs,
    b_bufs,
    empty,
    ready,
    a_scale_ptr,
    b_scale_ptr,
    slots_ptr,
    row_weights_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    out_ptr,
    out_scale_ptr,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
):
    """Rows 64 * half .. + 64 of every tile of this program."""
    COLUMNS: gl.constexpr = (COLS + 127) // 128
    K_BLOCKS: gl.constexpr = (DEPTH + 127) // 128
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    WIDTH: gl.constexpr = 16 if PLANES == 2 else 8  # elements of a 16-byte store
    stored: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 * WIDTH // 128, 128 // WIDTH], [4, 1], [1, 0])
    lane = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    lane_out = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
    num_tiles = gl.load(num_tiles_ptr)
    total = num_tiles * COLUMNS
    step = 0
    tile, column = _place(gl.minimum(gl.program_id(0), gl.maximum(total - 1, 0)), num_tiles, COLUMNS, GROUP_M)
    expert_next = gl.load(tile_expert_ptr + tile)
    first_next = gl.load(tile_row_ptr + tile)
    rows_next = gl.load(tile_rows_ptr + tile)
    for pid in range(gl.program_id(0), total, gl.num_programs(0)):
        expert = expert_next.to(gl.int64)
        first = first_next
        rows = rows_next
        tile, column = _place(pid, num_tiles, COLUMNS, GROUP_M)
        row = first + gl.where(lane < rows, lane, 0)
        a_scales = a_scale_ptr + row.to(gl.int64) * K_BLOCKS
        b_scales = b_scale_ptr + (expert * ((PLANES * COLS + 127) // 128) + column) * K_BLOCKS
        b_scales_up = b_scales + ((PLANES - 1) * COLS // 128) * K_BLOCKS
        if PLANES == 1:
            # Asked for now, needed after the last product.
            weight = gl.load(row_weights_ptr + row)
            slot = gl.load(slots_ptr + first + gl.where(lane_out < rows, lane_out, 0)).to(gl.int64)
        following_tile, _ = _place(gl.minimum(pid + gl.num_programs(0), total - 1), num_tiles, COLUMNS, GROUP_M)
        expert_next = gl.load(tile_expert_ptr + following_tile)
        first_next = gl.load(tile_row_ptr + following_tile)
        rows_next = gl.load(tile_rows_ptr + following_tile)
        for turn in gl.static_range(PLANES):
            acc = gl.zeros([64, 128], gl.float32, mma)
            a_scale_next = gl.load(a_scales)
            b_scale_next = gl.load(b_scales)
            up_scale_next = gl.load(b_scales_up)
            for block in range(K_BLOCKS):
                a_scale = a_scale_next
                b_scale = b_scale_next
                up_scale = up_scale_next
                following = gl.minimum(block + 1, K_BLOCKS - 1)
                a_scale_next = gl.load(a_scales + following)
                b_scale_next = gl.load(b_scales + following)
                up_scale_next = gl.load(b_scales_up + following)
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                part = gl.zeros([64, 128], gl.float32, mma)
                b = b_bufs.index(stage).permute((1, 0))
                part = warpgroup_mma(a_bufs.index(2 * stage + half), b, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                if PLANES == 2:
                    n = gl.arange(0, 128, layout=gl.SliceLayout(0, mma))
                    acc += part * gl.where((n < BLOCK_N)[None, :], (a_scale * b_scale)[:, None], (a_scale * up_scale)[:, None])
                else:
                    acc += part * (a_scale * b_scale)[:, None]
                step += 1
            if PLANES == 2:
                gate, up = acc.reshape([64, 2, BLOCK_N]).permute([0, 2, 1]).split()
                if LIMIT is not None:
                    gate = gl.minimum(gate, LIMIT)
                    up = gl.maximum(gl.minimum(up, LIMIT), -LIMIT)
                out = gate / (1.0 + gl.exp(-ALPHA * gate)) * (up + BETA)
                if turn == 0:
                    left = out
        live = lane_out < rows
        n_out = column * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, stored))
        if PLANES == 2:
            # Both turns share one scale, so that the second product's depth comes in blocks of 128 like its weights' scales.
            both = gl.join(left, out).permute([0, 2, 1]).reshape([64, 128])
            both = gl.convert_layout(both, mma)
            scale = gl.maximum(gl.max(gl.abs(both), axis=1), 1e-10) / 448.0
            q = gl.convert_layout((both / scale[:, None]).to(gl.float8e4nv), stored)
            row_out = (first + lane_out).to(gl.int64)
            gl.store(out_ptr + row_out[:, None] * COLS + n_out[None, :], q, mask=live[:, None])
            gl.store(out_scale_ptr + row_out * COLUMNS + column, gl.convert_layout(scale, gl.SliceLayout(1, stored)), mask=live)
        else:
            y = gl.convert_layout((acc * weight[:, None]).to(out_ptr.dtype.element_ty), stored)
            gl.store(out_ptr + slot[:, None] * COLS + n_out[None, :], y, mask=live[:, None])


@gluon.jit
def product_kernel(
    a_desc,
    b_desc,
    a_scale_ptr,
    b_scale_ptr,
    slots_ptr,
    row_weights_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    out_ptr,
    out_scale_ptr,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """PLANES 2: act[row] = SwiGLU(a[row] @ b.T) in fp8 and its scales; PLANES 1: y[slots[row]] = row_weights[row] * (a[row] @ b.T)."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 64, 128], swizzled)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 128, 128], swizzled)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)  # both multiplying warpgroups are done with it
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (0, a_bufs, b_bufs, empty, ready, a_scale_ptr, b_scale_ptr, slots_ptr, row_weights_ptr, tile_expert_ptr, tile_row_ptr,
                 tile_rows_ptr, num_tiles_ptr, out_ptr, out_scale_ptr, DEPTH, COLS, PLANES, BLOCK_N, STAGES, GROUP_M,
                 LIMIT, ALPHA, BETA),
            ),
            (
                _multiply,
                (1, a_bufs, b_bufs, empty, ready, a_scale_ptr, b_scale_ptr, slots_ptr, row_weights_ptr, tile_expert_ptr, tile_row_ptr,
                 tile_rows_ptr, num_tiles_ptr, out_ptr, out_scale_ptr, DEPTH, COLS, PLANES, BLOCK_N, STAGES, GROUP_M,
                 LIMIT, ALPHA, BETA),
            ),
            (
                _copy,
                (a_desc, b_desc, a_bufs, b_bufs, empty, ready, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, DEPTH, COLS, PLANES,
                 BLOCK_N, STAGES, GROUP_M),
            ),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def scatter_blocks(hidden: int) -> int:
    """Programs of a token."""
    return -(-hidden // (128 * QUANTISE_GROUPS))


def scatter_launch(*, dtype: torch.dtype, hidden: int, top_k: int, pdl: bool) -> Launch:
    """Grid T * scatter_blocks(H); arguments x, weights [T, K], places [S], q [S, H], scale [S, ceil(H / 128)], row_weights [S], T."""
    constants = {"HIDDEN": hidden, "TOP_K": top_k, "GROUPS": QUANTISE_GROUPS, "PDL": pdl}
    params = (dtype, torch.float32, torch.int32, torch.float8_e4m3fn, torch.float32, torch.float32, INT)
    return Launch(scatter_kernel, params, constants, num_warps=4, pdl=pdl)


def product_launches(
    *, dtype: torch.dtype, hidden: int, inter: int, limit: float | None, alpha: float, beta: float, group_m: int, stages: int
) -> dict[str, Launch]:
    """ "up" and "down", each over a grid of at most one program a multiprocessor."""
    common: dict[str, Any] = {"STAGES": stages, "GROUP_M": group_m, "LIMIT": limit, "ALPHA": alpha, "BETA": beta}
    common |= {"MULTIPLY_REGISTERS": MULTIPLY_REGISTERS, "COPY_REGISTERS": COPY_REGISTERS}
    fp8, fp32, ints = torch.float8_e4m3fn, torch.float32, (torch.int32,) * 4

    def launch(box_rows: int, params: tuple[Any, ...], **sizes: int) -> Launch:
        descriptors = (Descriptor(fp8, (64, 128), swizzle=128), Descriptor(fp8, (box_rows, 128), swizzle=128))
        return Launch(product_kernel, (*descriptors, fp32, fp32, torch.int32, *params), common | sizes, max_registers=REGISTERS)

    return {
        "up": launch(64, (None, *ints, fp8, fp32), DEPTH=hidden, COLS=inter, PLANES=2, BLOCK_N=64),
        "down": launch(128, (fp32, *ints, dtype, None), DEPTH=inter, COLS=hidden, PLANES=1, BLOCK_N=128),
    }
