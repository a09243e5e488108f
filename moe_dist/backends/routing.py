"""Routing in torch, exactly as `RoutingConfig` documents it, and the step from global ids to rows of this rank's weights.

Backends and operations import this; it knows no tactic. Shapes: T tokens, N routed experts, K slots (top_k, then fused
shared experts).
"""

from __future__ import annotations

import torch

from moe_dist.backends.base import BoundLayer
from moe_dist.config import RoutingConfig
from moe_dist.tensors import MoEActivationPack


def route(
    logits_TN: torch.Tensor, routing: RoutingConfig, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: weights fp32 [T, K] (scaled) and global ids int32 [T, K], best first, then the fused shared experts.

    correction_bias: fp32 [N], where `routing.correction_bias` asks for one. Of equal scores the lower id wins.
    """
    logits = logits_TN.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if routing.n_group is not None and routing.topk_group is not None:
        grouped = choice.view(len(choice), routing.n_group, routing.num_experts // routing.n_group)
        best = 1 if correction_bias is None else min(2, grouped.shape[-1])
        group_scores = grouped.topk(best, dim=-1).values.sum(-1)
        groups = _best(group_scores, routing.topk_group)
        barred = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, groups, False)
        choice = grouped.masked_fill(barred[..., None], -torch.inf).flatten(-2)
    ids = _best(choice, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    weights = weights * routing.routed_scaling_factor
    if routing.num_fused_shared_experts:
        shared = torch.arange(routing.num_experts, routing.total_experts, device=ids.device).expand(ids.shape[0], -1)
        ids = torch.cat([ids, shared], -1)
        weights = torch.cat([weights, weights.new_ones(shared.shape)], -1)
    return weights, ids.int()


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest in each row; a stable sort, because topk leaves the order of equals open."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def select(layer: BoundLayer, acts: MoEActivationPack) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, weights) of a call: int64 [T, K] rows of w13 and w2, -1 where this rank computes nothing; fp32 [T, K].

    Ids outside the model's range, and rows outside the weights, count as remote: on a GPU nobody checked them before.
    """
    if acts.topk_ids is None:
        assert acts.router_logits is not None
        weights, ids = route(acts.router_logits, layer.problem.config.routing, layer.weights.correction_bias)
    else:
        assert acts.topk_weights is not None
        weights, ids = acts.topk_weights, acts.topk_ids
    rows = ids.long()
    if layer.expert_map is not None:
        total = layer.expert_map.shape[0]
        rows = layer.expert_map[rows.clamp(0, total - 1)].long().masked_fill((ids < 0) | (ids >= total), -1)
    return rows.masked_fill((rows < 0) | (rows >= layer.num_local_experts), -1), weights
