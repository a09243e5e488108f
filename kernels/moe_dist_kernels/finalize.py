"""The last step: the weighted rows of a token's slots become one row, or, unfinalized, remote slots become zeros.

Legend: T tokens, K slots, H hidden.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from moe_dist_kernels.align import Ids, local_expert
from moe_dist_kernels.compile_time import power_of_2
from moe_dist_kernels.launch import INT, Launch


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr"])
def finalize_kernel(
    y_ptr,
    ids_ptr,
    map_ptr,
    out_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = sum over k of y[t, k], in fp32 and in the order of k; remote slots of y are never read. Example: y rows [1, 2]
    and [10, 20] of one token give [11, 22], and [1, 2] if the second slot is remote."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK_H - 1) // BLOCK_H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        here = local_expert(ids_ptr, map_ptr, token * TOP_K + k, True, NUM_LOCAL, MAP_SIZE, "") >= 0
        acc += tl.load(y_ptr + (token * TOP_K + k) * HIDDEN + column, mask=column < tl.where(here, HIDDEN, 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, acc.to(out_ptr.dtype.element_ty), mask=column < HIDDEN)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr"])
def zero_remote_kernel(
    ids_ptr,
    map_ptr,
    out_ptr,
    num_slots,
    HIDDEN: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[slot] = 0 for every remote slot; other rows are left alone."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK_H - 1) // BLOCK_H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    remote = local_expert(ids_ptr, map_ptr, slot, True, NUM_LOCAL, MAP_SIZE, "") < 0
    tl.store(
        out_ptr + slot * HIDDEN + column, tl.zeros([BLOCK_H], dtype=out_ptr.dtype.element_ty), mask=column < tl.where(remote, HIDDEN, 0)
    )


def _block(hidden: int) -> int:
    return min(1024, int(power_of_2(hidden)))


@functools.cache  # asked at every call
def finalize_blocks(hidden: int) -> int:
    """Programs of a token (finalize) or slot (zero_remote)."""
    return -(-hidden // _block(hidden))


def finalize_launches(*, dtype: torch.dtype, ids: Ids, hidden: int, top_k: int, pdl: bool) -> dict[str, Launch]:
    """ "finalize": grid T * finalize_blocks(H); arguments y [T, K, H], ids [T, K], map or None, out [T, H], T. "zero_remote": grid
    S * finalize_blocks(H); arguments ids [S], map or None, out [S, H], S."""
    constants = {"HIDDEN": hidden, **ids.constants, "BLOCK_H": _block(hidden), "PDL": pdl}
    params = (*ids.params, dtype, INT)
    return {
        "finalize": Launch(finalize_kernel, (dtype, *params), constants | {"TOP_K": top_k}, num_warps=4, pdl=pdl),
        "zero_remote": Launch(zero_remote_kernel, params, constants, num_warps=4, pdl=pdl),
    }
