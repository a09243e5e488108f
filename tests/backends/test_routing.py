"""Routing against numbers worked out by hand, and against plain loops over random logits."""

from __future__ import annotations

import math

import pytest
import torch

import moe_dist as md
from moe_dist.backends.routing import route


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(logits: list[float], routing: md.RoutingConfig, bias: list[float] | None = None) -> list[tuple[int, float]]:
    """One row, slot by slot, in plain Python: the formulas of `RoutingConfig` read aloud."""
    if routing.scoring == "softmax":
        top = max(logits)
        total = sum(math.exp(x - top) for x in logits)
        scores = [math.exp(x - top) / total for x in logits]
    else:
        scores = [sigmoid(x) for x in logits]
    choice = [score + shift for score, shift in zip(scores, bias or [0.0] * len(scores), strict=True)]
    eligible = list(range(len(choice)))
    if routing.n_group is not None and routing.topk_group is not None:
        size = len(choice) // routing.n_group
        members = [range(group * size, (group + 1) * size) for group in range(routing.n_group)]
        worth = [sum(sorted((choice[e] for e in group), reverse=True)[: 2 if bias else 1]) for group in members]
        best = sorted(range(routing.n_group), key=lambda group: (-worth[group], group))[: routing.topk_group]
        eligible = [e for e in eligible if e // size in best]
    chosen = sorted(eligible, key=lambda e: (-choice[e], e))[: routing.top_k]
    total = sum(scores[e] for e in chosen) if routing.renormalize else 1.0
    return [(e, scores[e] / total * routing.routed_scaling_factor) for e in chosen] + [
        (routing.num_experts + shared, 1.0) for shared in range(routing.num_fused_shared_experts)
    ]


ROUTINGS = {
    "softmax": md.RoutingConfig(8, 3),
    "softmax, as it is": md.RoutingConfig(8, 3, renormalize=False),
    "sigmoid": md.RoutingConfig(8, 3, scoring="sigmoid"),
    "sigmoid, as it is": md.RoutingConfig(8, 3, scoring="sigmoid", renormalize=False),
    "deepseek v2: groups by their best": md.RoutingConfig(8, 3, n_group=4, topk_group=2, renormalize=False, routed_scaling_factor=16.0),
    "deepseek v3: groups by their best two, biased": md.RoutingConfig.deepseek_v3(8, 3, n_group=4, topk_group=2),
    "groups of one, biased": md.RoutingConfig.deepseek_v3(8, 3, n_group=8, topk_group=4),
    "biased, no groups": md.RoutingConfig.deepseek_v3(8, 3, n_group=None, topk_group=None),
    "scaled, with a shared expert": md.RoutingConfig(8, 3, routed_scaling_factor=2.5, num_fused_shared_experts=1),
    "llama4": md.RoutingConfig.llama4(8),
    "all": md.RoutingConfig(8, 8),
    "one expert": md.RoutingConfig(1, 1),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_agrees_with_the_formulas(name: str) -> None:
    routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, routing.num_experts, generator=generator) * 2
    bias = torch.randn(routing.num_experts, generator=generator) if routing.correction_bias else None
    weights, ids = route(logits, routing, bias)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    for row in range(50):
        expected = by_hand(logits[row].tolist(), routing, None if bias is None else bias.tolist())
        assert ids[row].tolist() == [expert for expert, _ in expected]
        assert weights[row].tolist() == pytest.approx([weight for _, weight in expected], rel=1e-5)


def test_worked_example() -> None:
    # scores exp(2), exp(1), 1, 1 over their sum 12.107...
    weights, ids = route(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), md.RoutingConfig(4, 2, renormalize=False))
    assert ids.tolist() == [[1, 0]]
    assert weights.tolist()[0] == pytest.approx([0.610, 0.224], abs=1e-3)
    assert weights.sum() < 1
    weights, _ = route(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), md.RoutingConfig(4, 2, routed_scaling_factor=2.5, num_fused_shared_experts=1))
    assert weights.tolist()[0] == pytest.approx([2.5 * 0.731, 2.5 * 0.269, 1.0], abs=1e-3)  # the shared expert is not scaled


def test_bias_chooses_but_never_weighs() -> None:
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0])
    weights, ids = route(torch.tensor([[1.0, 2.0, -3.0, 0.0]]), md.RoutingConfig(4, 1, scoring="sigmoid", renormalize=False), bias)
    assert ids.tolist() == [[2]]
    assert weights.item() == pytest.approx(sigmoid(-3.0))


def test_negative_biases_never_lift_a_barred_group() -> None:
    # All biased scores of the chosen group are below zero; a mask of zeros would let the other group in.
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0])
    _, ids = route(torch.zeros(1, 4), md.RoutingConfig.deepseek_v3(4, 2, n_group=2, topk_group=1), bias)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("experts", [8, 257])  # 257: a sort wide enough that an unstable one shows
def test_of_equal_scores_the_lower_id_wins(experts: int) -> None:
    _, ids = route(torch.zeros(3, experts), md.RoutingConfig(experts, 4))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_hopeless_logits_give_no_nan(scoring: str) -> None:
    weights, _ = route(torch.full((1, 4), -200.0), md.RoutingConfig(4, 2, scoring=scoring))
    assert weights.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_taken_in_fp32(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert torch.equal(route(logits.to(dtype), md.RoutingConfig(4, 2))[0], route(logits, md.RoutingConfig(4, 2))[0])


def test_no_tokens() -> None:
    weights, ids = route(torch.zeros(0, 8), md.RoutingConfig.deepseek_v3(8, 3, n_group=4, topk_group=2), torch.zeros(8))
    assert weights.shape == ids.shape == (0, 3)
