"""Hidden states to fp8: one fp32 scale for each row and 128 columns. Legend: T tokens, H hidden."""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_dist_kernels.launch import INT, Launch

GROUPS = 8  # scale groups of one program


@triton.jit
def quantised(row_ptr, first, TYPE: tl.constexpr, HIDDEN: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS scale groups of a row from group `first` on: (q [GROUPS, 128], scale [GROUPS], the columns and the groups)."""
    group = first + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(row_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10) / 448.0
    return (x * (1.0 / scale)[:, None]).to(TYPE), scale, column, group


@triton.jit(do_not_specialize=["num_tokens"])
def quantise_kernel(x_ptr, q_ptr, scale_ptr, num_tokens, HIDDEN: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """q = x / scale in fp8 e4m3, scale = largest |x| of a group / 448. Example, a group of [1, -2, 0, ...]: scale 2/448, q [224, -448, 0, ...]."""
    ALL: tl.constexpr = (HIDDEN + 127) // 128
    BLOCKS: tl.constexpr = (ALL + GROUPS - 1) // GROUPS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = (tl.program_id(0) % BLOCKS) * GROUPS
    q, scale, column, group = quantised(x_ptr + token * HIDDEN, first, q_ptr.dtype.element_ty, HIDDEN, GROUPS)
    tl.store(q_ptr + token * HIDDEN + column, q, mask=column < HIDDEN)
    tl.store(scale_ptr + token * ALL + group, scale, mask=group < ALL)


def quantise_blocks(hidden: int) -> int:
    """Programs of a token."""
    return -(-hidden // (128 * GROUPS))


def quantise_launch(*, dtype: torch.dtype, hidden: int, pdl: bool) -> Launch:
    """Grid T * quantise_blocks(H); arguments x [T, H], q fp8 [T, H], scale fp32 [T, ceil(H / 128)], T."""
    params = (dtype, torch.float8_e4m3fn, torch.float32, INT)
    return Launch(quantise_kernel, params, {"HIDDEN": hidden, "GROUPS": GROUPS, "PDL": pdl}, num_warps=4, pdl=pdl)
