"""What is done row by row before the products: routing against torch, each scoring, grouping and odd size once; quantising."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moe_dist_kernels.quantise import quantise_blocks, quantise_launch
from moe_dist_kernels.routing import route_launch

from moe_dist.backends.routing import route
from moe_dist.config import RoutingConfig


def run(logits: torch.Tensor, routing: RoutingConfig, stream: int, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    launch = route_launch(
        logits_dtype=logits.dtype,
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        n_group=routing.n_group,
        topk_group=routing.topk_group,
        num_shared=routing.num_fused_shared_experts,
        scoring=routing.scoring,
        renormalize=routing.renormalize,
        scale=routing.routed_scaling_factor,
        bias=bias is not None,
        pdl=False,
    )
    tokens = logits.shape[0]
    ids = torch.full((tokens, routing.slots), -7, dtype=torch.int32, device=logits.device)
    weights = torch.full((tokens, routing.slots), torch.nan, device=logits.device)
    arguments: list[Any] = [logits, bias, ids, weights]
    if logits.device.type == "cuda":
        arguments = [None if tensor is None else tensor.data_ptr() for tensor in arguments]
    launch(tokens, 0, stream, *arguments, tokens)
    return ids.cpu(), weights.cpu()


def test_worked_example(device: torch.device, stream: int) -> None:
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]], device=device)
    ids, weights = run(logits, RoutingConfig(3, 2), stream)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[5 / 7, 2 / 7]]))


@pytest.mark.parametrize(
    "routing",
    [
        RoutingConfig(1, 1),  # one expert
        RoutingConfig(60, 4, renormalize=False),  # softmax that sums below 1; experts no power of two
        RoutingConfig(257, 8),  # one past a power of two
        RoutingConfig(1025, 2, scoring="sigmoid", renormalize=False),
        RoutingConfig.deepseek_v3(64, 6, topk_group=3),  # grouped, biased, scaled
        RoutingConfig(60, 4, n_group=6, topk_group=2),  # groups of 10, best score of a group
        RoutingConfig(8, 2, routed_scaling_factor=2.5, num_fused_shared_experts=1),  # shared: weight 1, not scaled
        RoutingConfig.llama4(16),
    ],
    ids=lambda routing: f"{routing.num_experts}-{routing.scoring}-{routing.n_group}",
)
def test_equals_torch(routing: RoutingConfig, device: torch.device, stream: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, routing.num_experts, device=device) * 2
    bias = torch.randn(routing.num_experts, device=device) if routing.correction_bias else None
    weights, ids = route(logits.cpu(), routing, None if bias is None else bias.cpu())
    got_ids, got_weights = run(logits, routing, stream, bias)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got_weights, weights)


def test_quantise_worked_example(device: torch.device, stream: int) -> None:
    """A group of [1, -2, 0, ...]: scale 2/448, q [224, -448, 0, ...]; a row of two groups, the second all zero."""
    x = torch.zeros(1, 256, device=device)
    x[0, :2] = torch.tensor([1.0, -2.0], device=device)
    q = torch.full((1, 256), 0xFF, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.full((1, 2), torch.nan, device=device)
    arguments: list[Any] = [x, q, scale]
    if device.type == "cuda":
        arguments = [tensor.data_ptr() for tensor in arguments]
    quantise_launch(dtype=torch.float32, hidden=256, pdl=False)(quantise_blocks(256), 0, stream, *arguments, 1)
    assert q.float()[0, :3].tolist() == [224.0, -448.0, 0.0]
    assert not q.float()[0, 3:].any()
    torch.testing.assert_close(scale.cpu(), torch.tensor([[2 / 448, 1e-10 / 448]]))


def test_ties_go_to_the_lower_id(device: torch.device, stream: int) -> None:
    ids, _ = run(torch.zeros(1, 60, device=device), RoutingConfig(60, 4), stream)
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_ids_stay_distinct_and_in_range_when_logits_are_no_numbers(bad: float, device: torch.device, stream: int) -> None:
    """Three numbers among eight: they come first, then whatever is left, each once."""
    logits = torch.full((1, 8), bad, device=device)
    logits[0, [6, 2, 4]] = torch.tensor([3.0, 2.0, 1.0], device=device)
    found = run(logits, RoutingConfig(8, 5), stream)[0][0].tolist()
    assert found[:3] == [6, 2, 4]
    assert len(set(found)) == 5
    assert all(0 <= expert < 8 for expert in found)
