"""What one warpgroup makes of one tile of the products in hopper.py: the sums over the depth, and their way out.

`scaled_tile` for fp8 by blocks: a product over one scale block is added to the fp32 sum while the other warpgroup's product runs. `plain_tile`
for 16-bit weights. Both take stages from the copying warps and give them back. Imported by hopper.py alone; legend as in grouped.py.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _activated(gate, up, LIMIT: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr):
    """SwiGLU, as activation.py has it."""
    if LIMIT is not None:
        gate = gl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = gl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = gl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + gl.exp(-ALPHA * gate)) * (up + BETA)


@gluon.jit
def _store_rows(
    half: gl.constexpr, acc, acc_2, weight, slot, live, n, column, out_ptr, stored: gl.constexpr, COLS: gl.constexpr, FEW: gl.constexpr
):
    """The second product's rows, each times its weight, at its slot: 128 columns of each sum, or, if FEW, this half's alone."""
    start = column * 256 + (128 * half if FEW else 0)
    y_ptrs = out_ptr + slot[:, None] * COLS + (column * 256 + n)[None, :]
    y = gl.convert_layout((acc * weight[:, None]).to(out_ptr.dtype.element_ty), stored)
    gl.store(y_ptrs, y, mask=(live & (start < COLS))[:, None])
    if not FEW:
        y = gl.convert_layout((acc_2 * weight[:, None]).to(out_ptr.dtype.element_ty), stored)
        gl.store(y_ptrs + 128, y, mask=(live & (start + 128 < COLS))[:, None])


@gluon.jit
def scaled_tile(
    half: gl.constexpr,
    buffers,
    barriers,
    meeting,
    meetings,
    step,
    a_scales,
    b_scales,
    b_scales_2,
    expert_rows,
    column,
    weight,
    slot,
    out_ptr,
    out_scale_ptr,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    STAGES: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    TOP_K: gl.constexpr,
    FEW: gl.constexpr,
):
    """One warpgroup's part of a tile: rows 64 * half on, or, if FEW, all rows in half of the columns."""
    K_BLOCKS: gl.constexpr = (DEPTH + 127) // 128
    N: gl.constexpr = 64 if FEW and PLANES == 2 else 128  # columns of a product
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    VECTOR: gl.constexpr = 16 if PLANES == 2 else 8  # elements of a 16-byte store
    stored: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // N, N // VECTOR], [4, 1], [1, 0])
    a_bufs, b_bufs = buffers
    empty, ready = barriers
    largest, met = meeting
    first, rows = expert_rows
    acc = gl.zeros([64, N], gl.float32, mma)
    acc_2 = gl.zeros([64, N], gl.float32, mma)
    a_scale = gl.load(a_scales)
    scale_next = a_scale * gl.load(b_scales)
    scale_2_next = a_scale * gl.load(b_scales_2)
    for block in range(K_BLOCKS):
        scale = gl.convert_layout(scale_next, gl.SliceLayout(1, mma))
        scale_2 = gl.convert_layout(scale_2_next, gl.SliceLayout(1, mma))
        ahead = gl.minimum(block + 1, K_BLOCKS - 1)
        a_scale = gl.load(a_scales + ahead)
        b_scale = gl.load(b_scales + ahead)
        b_scale_2 = gl.load(b_scales_2 + ahead)
        at = step + block
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        if TOP_K > 0:
            fence_async_shared()  # rows were written by threads, not by the copy engine
        part = gl.zeros([64, N], gl.float32, mma)
        part_2 = gl.zeros([64, N], gl.float32, mma)
        b = b_bufs.index(2 * stage)
        b_2 = b_bufs.index(2 * stage + 1)
        if FEW:
            a = a_bufs.index(2 * stage)
            if PLANES == 2:
                part = warpgroup_mma(a, b.slice(64 * half, 64, dim=0).permute((1, 0)), part, use_acc=False, is_async=True)
                part_2 = warpgroup_mma(a, b_2.slice(64 * half, 64, dim=0).permute((1, 0)), part_2, use_acc=False, is_async=True)
                part, part_2 = warpgroup_mma_wait(0, deps=(part, part_2))
                mbarrier.arrive(empty.index(stage), count=1)
                acc += part * scale[:, None]
                acc_2 += part_2 * scale_2[:, None]
            else:
                if half == 1:
                    b = b_2
                    scale = scale_2
                part = warpgroup_mma(a, b.permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                acc += part * scale[:, None]
        else:
            a = a_bufs.index(2 * stage + half)
            part = warpgroup_mma(a, b.permute((1, 0)), part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            acc += part * scale[:, None]
            part_2 = warpgroup_mma(a, b_2.permute((1, 0)), part_2, use_acc=False, is_async=True)
            part_2 = warpgroup_mma_wait(0, deps=(part_2,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc_2 += part_2 * scale_2[:, None]
        scale_next = a_scale * b_scale
        scale_2_next = a_scale * b_scale_2
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, stored)) + (0 if FEW else 64 * half)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, stored)) + (N * half if FEW else 0)
    live = lane < rows
    if PLANES == 2:
        act = _activated(acc, acc_2, LIMIT, ALPHA, BETA)
        most = gl.max(gl.abs(act), axis=1)
        # One scale for 128 columns: the warpgroups show each other the largest of theirs. All of one have stored before its one thread
        # arrives (the compiler's barrier of the warpgroup), and `met` turns when both have: what is read has been written. They take turns
        # at two slots: who stores for meeting m + 2 has seen m + 1, where the other arrived after it had read m. racecheck of
        # compute-sanitizer reports this pair, wrongly (docs/kernels.md; test_compile.py looks for each step in the compiled code).
        if FEW:
            largest.index(2 * (meetings & 1) + half).store(most)
            mbarrier.arrive(met, count=1)
            mbarrier.wait(met, meetings & 1)
            most = gl.maximum(most, largest.index(2 * (meetings & 1) + 1 - half).load(gl.SliceLayout(1, mma)))
        act_scale = gl.maximum(most, 1e-10) / 448.0
        q = gl.convert_layout((act * (1.0 / act_scale)[:, None]).to(gl.float8e4nv), stored)
        row = (first + gl.where(live, lane, 0)).to(gl.int64)
        gl.store(out_ptr + row[:, None] * COLS + (column * 128 + n)[None, :], q, mask=live[:, None])
        if half == 0 or not FEW:
            COLUMNS: gl.constexpr = (COLS + 127) // 128
            gl.store(out_scale_ptr + row * COLUMNS + column, gl.convert_layout(act_scale, gl.SliceLayout(1, stored)), mask=live)
    else:
        _store_rows(half, acc, acc_2, weight, slot, live, n, column, out_ptr, stored, COLS, FEW)


@gluon.jit
def plain_tile(
    half: gl.constexpr,
    buffers,
    barriers,
    step,
    expert_rows,
    column,
    weight,
    slot,
    out_ptr,
    DEPTH: gl.constexpr,
    COLS: gl.constexpr,
    PLANES: gl.constexpr,
    STAGES: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    TOP_K: gl.constexpr,
    FEW: gl.constexpr,
):
    """As `scaled_tile`, without scales: products add to the sums themselves, and one step's run while the next's are issued."""
    STEPS: gl.constexpr = (DEPTH + 63) // 64
    N: gl.constexpr = 64 if FEW and PLANES == 2 else 128  # columns of a product
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    a_bufs, b_bufs = buffers
    empty, ready = barriers
    first, rows = expert_rows
    acc = gl.zeros([64, N], gl.float32, mma)
    acc_2 = gl.zeros([64, N], gl.float32, mma)
    for block in range(STEPS):
        at = step + block
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
        if TOP_K > 0:
            fence_async_shared()  # rows were written by threads, not by the copy engine
        b = b_bufs.index(2 * stage)
        b_2 = b_bufs.index(2 * stage + 1)
        if FEW:
            a = a_bufs.index(2 * stage)
            if PLANES == 2:
                acc = warpgroup_mma(a, b.slice(64 * half, 64, dim=0).permute((1, 0)), acc, is_async=True)
                acc_2 = warpgroup_mma(a, b_2.slice(64 * half, 64, dim=0).permute((1, 0)), acc_2, is_async=True)
                acc, acc_2 = warpgroup_mma_wait(2, deps=(acc, acc_2))
            else:
                if half == 1:
                    b = b_2
                acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
        else:
            a = a_bufs.index(2 * stage + half)
            acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
            acc_2 = warpgroup_mma(a, b_2.permute((1, 0)), acc_2, is_async=True)
            acc, acc_2 = warpgroup_mma_wait(2, deps=(acc, acc_2))
        # What is still running reads this step's stage alone.
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=block > 0)
    acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
    mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES), count=1)
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, stored)) + (0 if FEW else 64 * half)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, stored)) + (N * half if FEW else 0)
    live = lane < rows
    if PLANES == 2:
        act = _activated(acc, acc_2, LIMIT, ALPHA, BETA)
        out = gl.convert_layout(act.to(out_ptr.dtype.element_ty), stored)
        row = (first + gl.where(live, lane, 0)).to(gl.int64)
        columns = column * 128 + n
        gl.store(out_ptr + row[:, None] * COLS + columns[None, :], out, mask=live[:, None] & (columns < COLS)[None, :])
    else:
        _store_rows(half, acc, acc_2, weight, slot, live, n, column, out_ptr, stored, COLS, FEW)
