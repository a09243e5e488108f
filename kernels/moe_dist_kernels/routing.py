"""Routing: from router logits to the experts of each token and their weights.

Legend: T tokens, N routed experts, K routed slots of a token, KS = K + fused shared experts.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moe_dist_kernels.compile_time import power_of_2
from moe_dist_kernels.launch import INT, Launch


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["logits_ptr", "bias_ptr"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token a program: ids[T, KS] int32 and weights[T, KS] fp32, best expert first, ties to the lower id.

    Experts are seen as a [groups, experts of a group] tile padded to powers of two. Example, softmax over logits
    [0, ln 2, ln 5] with top-2, renormalised: probabilities [1/8, 2/8, 5/8], ids [2, 1], weights [5/7, 2/7].
    A NaN logit never wins over a number.
    """
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    G: tl.constexpr = power_of_2(NUM_GROUPS)
    S: tl.constexpr = power_of_2(GROUP_SIZE)
    SLOTS: tl.constexpr = TOP_K + NUM_SHARED
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)[:, None]
    member = tl.arange(0, S)[None, :]
    valid = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    expert = group * GROUP_SIZE + member
    if PDL:
        tl.extra.cuda.gdc_wait()
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=valid, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, -float("inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        top = tl.max(tl.max(logits, axis=1), axis=0)
        exps = tl.where(valid, tl.exp(logits - top), 0.0)
        scores = exps / tl.sum(tl.sum(exps, axis=1), axis=0)
    selection = scores
    if bias_ptr is not None:
        selection += tl.load(bias_ptr + expert, mask=valid, other=0.0).to(tl.float32)
    # Numbers never fall to -inf, which marks what is padding, taken or out of the running.
    selection = tl.where(valid, tl.maximum(selection, -3.0e38), -float("inf"))
    if TOPK_GROUPS < NUM_GROUPS:
        best, at = tl.max(selection, axis=1, return_indices=True)
        if bias_ptr is not None:
            second = tl.max(tl.where(member == at[:, None], -float("inf"), selection), axis=1)
            best = tl.where(second > -float("inf"), best + second, best)
        group_1d = tl.arange(0, G)
        best = tl.where(group_1d < NUM_GROUPS, tl.maximum(best, -3.0e38), -float("inf"))
        kept = tl.zeros([G], dtype=tl.int1)
        for _ in tl.static_range(TOPK_GROUPS):
            winner = tl.argmax(tl.where(kept, -float("inf"), best), axis=0)
            kept = kept | (group_1d == winner)
        selection = tl.where(kept[:, None], selection, -float("inf"))
    flat = tl.reshape(selection, [G * S])
    flat_scores = tl.reshape(scores, [G * S])
    index = tl.arange(0, G * S)
    PAD: tl.constexpr = power_of_2(SLOTS)
    slot = tl.arange(0, PAD)
    ids = tl.zeros([PAD], dtype=tl.int32) + NUM_EXPERTS + slot - TOP_K  # fused shared experts follow the routed ones
    weights = tl.zeros([PAD], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        winner = tl.argmax(flat, axis=0)
        hit = index == winner
        weight = tl.sum(tl.where(hit, flat_scores, 0.0), axis=0)
        flat = tl.where(hit, -float("inf"), flat)
        ids = tl.where(slot == k, (winner // S) * GROUP_SIZE + winner % S, ids)
        weights = tl.where(slot == k, weight, weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = tl.where(slot < TOP_K, weights * SCALE, 1.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(ids_ptr + token * SLOTS + slot, ids, mask=slot < SLOTS)
    tl.store(weights_ptr + token * SLOTS + slot, weights, mask=slot < SLOTS)


def route_launch(
    *,
    logits_dtype: torch.dtype,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    num_shared: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    bias: bool,
    pdl: bool,
) -> Launch:
    """Route `T` tokens with a grid of T; arguments logits [T, N], bias [N] fp32 or None, ids, weights, T.

    scoring: "softmax" or "sigmoid". bias: a correction bias is added to what selects, never to the weights; a group
    then scores the sum of its two best. scale multiplies the routed weights; shared experts get weight 1.
    """
    padded = power_of_2(num_experts)
    constants: dict[str, Any] = {
        "NUM_EXPERTS": num_experts,
        "NUM_GROUPS": n_group or 1,
        "TOPK_GROUPS": topk_group or 1,
        "TOP_K": top_k,
        "NUM_SHARED": num_shared,
        "SIGMOID": scoring == "sigmoid",
        "RENORMALIZE": renormalize,
        "SCALE": scale,
        "PDL": pdl,
    }
    params = (logits_dtype, torch.float32 if bias else None, torch.int32, torch.float32, INT)
    return Launch(route_kernel, params, constants, num_warps=1 if padded <= 512 else 4, pdl=pdl)
