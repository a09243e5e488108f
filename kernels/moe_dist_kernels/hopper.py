"""The products for many rows on Hopper, fp8 or 16 bits: persistent, warp-specialised, in Gluon.

A tile is 128 rows by 256 rows of weights: gate and up for 128 columns of the activation, or 256 columns of the second product. Copying
warps bring operands, several stages ahead. Two warpgroups multiply: 64 rows each or, of a tile with no more than 64, half of the
columns each (hopper_tiles.py). Programs take tiles from a counter, so that nobody waits for those whose tiles were fuller. Needs compute
capability 9.0 (wgmma); knows SwiGLU alone and no bias. Imported when such a plan is bound, never before: Gluon is young and absent where
it isn't needed.

fp8 rows come quantised. Either copied into sorted order (`scatter_kernel`), so that half a tile is one box of memory, or, with `gather`, by
token, fetched one by one; 16-bit rows are always fetched. Rows past an expert's end are the next expert's: they are multiplied and never
stored. Legend as in grouped.py.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_dist_kernels.hopper_tiles import plain_tile, scaled_tile
from moe_dist_kernels.launch import INT, Descriptor, Launch
from moe_dist_kernels.quantise import quantised

# Their names changed between triton 3.6 and 3.9.
_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

STAGES = 4  # of 48 KB
BOX_BYTES = 128  # of depth that a stage holds of each row
RING = 8  # tiles whose numbers can be on their way from the copying warps to the others: four at most are
COUNTED_DEPTH = 768  # bytes; shallower products walk their tiles in fixed steps: fetching the next number would take longer than a tile
QUANTISE_GROUPS = 8  # scale groups of one program of the scatter
# 12 warps start with 168 registers a thread and share them out anew. With 240 and 24 the compiler keeps sums on the stack, oddly.
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
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q, scale, column, group = quantised(x_ptr + token * HIDDEN, block * GROUPS, q_ptr.dtype.element_ty, HIDDEN, GROUPS)
    rows = ()  # all are asked for before the first is needed
    weights = ()
    for k in tl.static_range(TOP_K):
        rows = rows + (tl.load(places_ptr + token * TOP_K + k),)  # noqa: RUF005 -- Triton knows no stars
        weights = weights + (tl.load(weights_ptr + token * TOP_K + k),)  # noqa: RUF005
    for k in tl.static_range(TOP_K):
        row = rows[k].to(tl.int64)
        here = row >= 0
        tl.store(q_ptr + row * HIDDEN + column, q, mask=column < tl.where(here, HIDDEN, 0))
        tl.store(scale_ptr + row * ALL + group, scale, mask=group < tl.where(here, ALL, 0))
        tl.store(row_weights_ptr + row, weights[k], mask=here & (block == 0))


@gluon.jit
def _wait_for_predecessor():
    """Programmatic dependent launch: nothing before here reads what the previous kernel writes; then let the next one start."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile_at(pid, num_tiles, tiles, COLUMNS: gl.constexpr, GROUP_M: gl.constexpr):
    """Column block, expert, first row and number of rows of tile `pid`, from 0 on; of the last for numbers past the end."""
    pid = gl.minimum(pid, gl.maximum(num_tiles * COLUMNS - 1, 0))
    per_group = GROUP_M * COLUMNS
    first = (pid // per_group) * GROUP_M
    height = gl.maximum(gl.minimum(num_tiles - first, GROUP_M), 1)  # without a single tile, tile 0 is looked up and not used
    inside = pid % per_group
    tile = first + inside % height
    return inside // height, gl.load(tiles[0] + tile), gl.load(tiles[1] + tile), gl.load(tiles[2] + tile)


@gluon.jit
def _copy(
    a,
    b_desc,
    buffers,
    barriers,
    calls,
    slots_ptr,
    tiles,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TOP_K: gl.constexpr,
    DYNAMIC: gl.constexpr,
    RING: gl.constexpr,
    STEP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """a: a descriptor, or, with TOP_K, a pointer to rows by token. STEP: elements of 128 bytes of depth."""
    WIDTH: gl.constexpr = 256 // PLANES
    COLUMNS: gl.constexpr = (COLS + WIDTH - 1) // WIDTH
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    spread: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [WARPS, 1], [1, 0])
    a_bufs, b_bufs = buffers
    empty, ready = barriers
    ring, posted = calls
    num_tiles_ptr = tiles[3]
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, spread))
    num_tiles = gl.load(num_tiles_ptr)
    step = 0
    turn = 0
    pid = gl.program_id(0)
    column, expert_next, first_next, rows_next = _tile_at(pid, num_tiles, tiles, COLUMNS, GROUP_M)
    while pid < num_tiles * COLUMNS:
        if DYNAMIC:
            following = gl.atomic_add(num_tiles_ptr + PLANES, 1, sem="relaxed") + gl.num_programs(0)
            ring.index(turn % RING).store(gl.full([1], 0, gl.int32, one) + following)
            mbarrier.arrive(posted.index(turn % RING), count=1)
        else:
            following = pid + gl.num_programs(0)
        first = first_next
        both = rows_next > 64
        b_row = expert_next * (PLANES * COLS) + column * WIDTH
        if TOP_K > 0:
            low = gl.load(slots_ptr + first + gl.where(lane < rows_next, lane, 0)) // TOP_K
            high = gl.load(slots_ptr + first + gl.where(lane + 64 < rows_next, lane + 64, 0)) // TOP_K
            depth = gl.arange(0, STEP, layout=gl.SliceLayout(0, spread))
            low_ptrs = a + (low.to(gl.int64) * DEPTH)[:, None] + depth[None, :]
            high_ptrs = a + (high.to(gl.int64) * DEPTH)[:, None] + depth[None, :]
        column, expert_next, first_next, rows_next = _tile_at(following, num_tiles, tiles, COLUMNS, GROUP_M)
        for k in range(0, DEPTH, STEP):
            stage = step % STAGES
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if TOP_K > 0:
                mbarrier.expect(bar, 256 * 128)
            else:
                mbarrier.expect(bar, (128 + 256) * 128, pred=both)
                mbarrier.expect(bar, (64 + 256) * 128, pred=both == 0)
                _load_box(a, [first, k], bar, a_bufs.index(2 * stage))
                _load_box(a, [first + 64, k], bar, a_bufs.index(2 * stage + 1), pred=both)
            _load_box(b_desc, [b_row, k], bar, b_bufs.index(2 * stage))
            _load_box(b_desc, [b_row + (COLS if PLANES == 2 else 128), k], bar, b_bufs.index(2 * stage + 1))
            if TOP_K > 0:
                _load_rows(a_bufs.index(2 * stage), low_ptrs)
                if both:
                    _load_rows(a_bufs.index(2 * stage + 1), high_ptrs)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                low_ptrs += STEP
                high_ptrs += STEP
            step += 1
        pid = following
        turn += 1


@gluon.jit
def _multiply(
    half: gl.constexpr,
    buffers,
    barriers,
    calls,
    meeting,
    scales,
    slots_ptr,
    row_weights_ptr,
    tiles,
    out_ptr,
    out_scale_ptr,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    TOP_K: gl.constexpr,
    BY_SLOT: gl.constexpr,
    DYNAMIC: gl.constexpr,
    RING: gl.constexpr,
    STEP: gl.constexpr,
):
    SCALED: gl.constexpr = STEP == 128
    WIDTH: gl.constexpr = 256 // PLANES
    COLUMNS: gl.constexpr = (COLS + WIDTH - 1) // WIDTH
    K_BLOCKS: gl.constexpr = (DEPTH + STEP - 1) // STEP
    SCALE_ROWS: gl.constexpr = (PLANES * COLS + 127) // 128
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, STEP // 4])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ring, posted = calls
    a_scale_ptr, b_scale_ptr = scales
    num_tiles = gl.load(tiles[3])
    step = 0
    turn = 0
    meetings = 0
    pid = gl.program_id(0)
    column, expert_next, first_next, rows_next = _tile_at(pid, num_tiles, tiles, COLUMNS, GROUP_M)
    while pid < num_tiles * COLUMNS:
        if DYNAMIC:
            mbarrier.wait(posted.index(turn % RING), (turn // RING) & 1)
            following = gl.sum(ring.index(turn % RING).load(one), 0)
        else:
            following = pid + gl.num_programs(0)
        expert = expert_next.to(gl.int64)
        first = first_next
        rows = rows_next
        few = rows <= 64
        base = gl.where(few, 0, half * 64)
        lane = base + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        row = first + gl.where(lane < rows, lane, 0)
        if SCALED:
            if TOP_K > 0:
                a_scales = a_scale_ptr + (gl.load(slots_ptr + row) // TOP_K).to(gl.int64) * K_BLOCKS
            else:
                a_scales = a_scale_ptr + row.to(gl.int64) * K_BLOCKS
            if PLANES == 2:
                b_scales = b_scale_ptr + (expert * SCALE_ROWS + column) * K_BLOCKS
                b_scales_2 = b_scales + (COLS // 128) * K_BLOCKS
            else:
                b_scales = b_scale_ptr + (expert * SCALE_ROWS + 2 * column) * K_BLOCKS
                b_scales_2 = b_scale_ptr + (expert * SCALE_ROWS + gl.minimum(2 * column + 1, SCALE_ROWS - 1)) * K_BLOCKS
        if PLANES == 2:
            weight = row  # neither is used
            slot = row
        else:
            # Asked for now, needed after the last product.
            lane_out = base + gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
            slot = gl.load(slots_ptr + first + gl.where(lane_out < rows, lane_out, 0)).to(gl.int64)
            weight = gl.load(row_weights_ptr + (gl.load(slots_ptr + row) if BY_SLOT else row))
        column_next, expert_next, first_next, rows_next = _tile_at(following, num_tiles, tiles, COLUMNS, GROUP_M)
        if SCALED:
            if few:
                scaled_tile(
                    half, buffers, barriers, meeting, meetings, step, a_scales, b_scales, b_scales_2, (first, rows), column, weight, slot,
                    out_ptr, out_scale_ptr, DEPTH, COLS, PLANES, STAGES, LIMIT, ALPHA, BETA, TOP_K, True,
                )  # fmt: skip
                meetings += 1
            else:
                scaled_tile(
                    half, buffers, barriers, meeting, meetings, step, a_scales, b_scales, b_scales_2, (first, rows), column, weight, slot,
                    out_ptr, out_scale_ptr, DEPTH, COLS, PLANES, STAGES, LIMIT, ALPHA, BETA, TOP_K, False,
                )  # fmt: skip
        elif few:
            plain_tile(
                half, buffers, barriers, step, (first, rows), column, weight, slot, out_ptr,
                DEPTH, COLS, PLANES, STAGES, LIMIT, ALPHA, BETA, TOP_K, True,
            )  # fmt: skip
        else:
            plain_tile(
                half, buffers, barriers, step, (first, rows), column, weight, slot, out_ptr,
                DEPTH, COLS, PLANES, STAGES, LIMIT, ALPHA, BETA, TOP_K, False,
            )  # fmt: skip
        step += K_BLOCKS
        column = column_next
        pid = following
        turn += 1


@gluon.jit
def product_kernel(
    a,
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
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    TOP_K: gl.constexpr,
    BY_SLOT: gl.constexpr,
    DYNAMIC: gl.constexpr,
    RING: gl.constexpr,
    STEP: gl.constexpr,
    COPY_WARPS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """PLANES 2: act[row] = SwiGLU(a[row] @ b.T) in fp8 and its scales; PLANES 1: y[slots[row]] = row_weights[row] * (a[row] @ b.T)."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=1024 // STEP, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, STEP], swizzled)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 128, STEP], swizzled)
    ring = gl.allocate_shared_memory(gl.int32, [RING, 1], plain)
    largest = gl.allocate_shared_memory(gl.float32, [4, 64], plain)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    posted = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)  # both multiplying warpgroups are done with it
        mbarrier.init(ready.index(i), count=129 if TOP_K > 0 else 1)  # the copy engine, and each thread that fetches rows
    if DYNAMIC:  # else their memory is somebody's scratch
        for i in gl.static_range(RING):
            mbarrier.init(posted.index(i), count=1)
    mbarrier.init(met, count=2)
    fence_async_shared()
    if PDL:
        _wait_for_predecessor()
    buffers = (a_bufs, b_bufs)
    barriers = (empty, ready)
    calls = (ring, posted)
    meeting = (largest, met)
    scales = (a_scale_ptr, b_scale_ptr)
    tiles = (tile_expert_ptr, tile_row_ptr, tile_rows_ptr, num_tiles_ptr)
    # The compiler tells the other warps what to run by a byte each in shared memory, between barriers of all warps (racecheck: see docs).
    gl.warp_specialize(
        [
            (
                _multiply,
                (gl.constexpr(0), buffers, barriers, calls, meeting, scales, slots_ptr, row_weights_ptr, tiles, out_ptr, out_scale_ptr,
                 DEPTH, COLS, PLANES, STAGES, GROUP_M, LIMIT, ALPHA, BETA, TOP_K, BY_SLOT, DYNAMIC, RING, STEP),
            ),
            (
                _multiply,
                (gl.constexpr(1), buffers, barriers, calls, meeting, scales, slots_ptr, row_weights_ptr, tiles, out_ptr, out_scale_ptr,
                 DEPTH, COLS, PLANES, STAGES, GROUP_M, LIMIT, ALPHA, BETA, TOP_K, BY_SLOT, DYNAMIC, RING, STEP),
            ),
            (
                _copy,
                (a, b_desc, buffers, barriers, calls, slots_ptr, tiles, DEPTH, COLS, PLANES, STAGES, GROUP_M, TOP_K, DYNAMIC, RING,
                 STEP, COPY_WARPS),
            ),
        ],
        [4, COPY_WARPS],
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
    *,
    dtype: torch.dtype,
    fp8: bool,
    hidden: int,
    inter: int,
    top_k: int,
    limit: float | None,
    alpha: float,
    beta: float,
    group_m: int,
    gather: bool,
    pdl: bool,
) -> dict[str, Launch]:
    """ "up" and "down", each over a grid of at most one program a multiprocessor. gather: rows lie by token, their weights by slot."""
    common: dict[str, Any] = {"LIMIT": limit, "ALPHA": alpha, "BETA": beta, "GROUP_M": group_m, "BY_SLOT": gather, "PDL": pdl}
    common |= {"STAGES": STAGES, "RING": RING, "MULTIPLY_REGISTERS": MULTIPLY_REGISTERS, "COPY_REGISTERS": COPY_REGISTERS}
    operand = torch.float8_e4m3fn if fp8 else dtype
    scale = torch.float32 if fp8 else None
    common["STEP"] = BOX_BYTES // operand.itemsize
    ints = torch.int32

    def launch(rows: Any, results: tuple[Any, ...], fetched: int, **sizes: Any) -> Launch:
        sizes |= {"TOP_K": fetched, "COPY_WARPS": 4 if fetched else 1}  # one warp copies boxes, four fetch rows
        sizes["DYNAMIC"] = sizes["DEPTH"] * operand.itemsize >= COUNTED_DEPTH
        weights = Descriptor(operand, (128, common["STEP"]), swizzle=BOX_BYTES)
        row_weights, out, out_scale = results
        params = (rows, weights, scale, scale, ints, row_weights, ints, ints, ints, ints, out, out_scale)
        return Launch(product_kernel, params, common | sizes, max_registers=REGISTERS, pdl=pdl)

    box = Descriptor(operand, (64, common["STEP"]), swizzle=BOX_BYTES)
    return {
        "up": launch(operand if gather else box, (None, operand, scale), top_k if gather else 0, DEPTH=hidden, COLS=inter, PLANES=2),
        "down": launch(box, (torch.float32, dtype, None), 0, DEPTH=inter, COLS=hidden, PLANES=1),
    }
