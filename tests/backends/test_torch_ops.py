"""The shared pieces by themselves, tightly: whole layers in bf16 forgive what these must not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moe_dist as md
from moe_dist.backends.torch_ops import FINALIZE_TOKENS, activate, dequantise, finalize
from tests.backends.oracle import activated, dequantised


@pytest.mark.parametrize(
    "activation",
    [
        md.ActivationConfig("swiglu"),
        md.ActivationConfig("swiglu", limit=0.5, alpha=1.702, beta=1.0),  # so low that clamping the gate from below would show
        md.ActivationConfig("geglu", beta=0.5),
        md.ActivationConfig("geglu", limit=0.5),
        md.ActivationConfig("relu2", limit=0.5),
        md.ActivationConfig("gelu"),  # the tanh form: the other one differs by 1e-3
        md.ActivationConfig("silu", limit=0.5),
    ],
    ids=lambda activation: f"{activation.kind}-{activation.limit}",
)
def test_activations_follow_their_formulas(activation: md.ActivationConfig) -> None:
    h = torch.linspace(-6, 6, 2 * 63).view(1, -1)[:, torch.randperm(126, generator=torch.Generator().manual_seed(0))]
    expected = activated(h.double().numpy(), activation)
    np.testing.assert_allclose(activate(h, activation).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_swiglu_worked_example() -> None:
    # silu(2) * 3 = 2 / (1 + e^-2) * 3; gate columns come first
    assert activate(torch.tensor([[2.0, 3.0]]), md.ActivationConfig()).item() == pytest.approx(5.28478, abs=1e-5)


def test_relu2_has_no_gate() -> None:
    assert activate(torch.tensor([[-1.0, 3.0]]), md.ActivationConfig("relu2")).tolist() == [[0.0, 9.0]]


@pytest.mark.parametrize(
    ("quant", "shape"),
    [
        (md.QuantConfig(weight="fp8"), (3,)),
        (md.QuantConfig(weight="fp8", granularity="channel"), (3, 10)),
        (md.QuantConfig(weight="fp8", block_shape=(4, 8)), (3, 3, 2)),  # 10 rows and 12 columns: both last blocks are partial
        (md.QuantConfig(weight="fp8", block_shape=(128, 128)), (3, 1, 1)),  # larger than the weight
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_every_value_meets_its_own_scale(quant: md.QuantConfig, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 10, 12, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator) + 0.5
    config = md.MoEConfig(routing=md.RoutingConfig(3, 1), experts=md.ExpertConfig(hidden_size=12, intermediate_size=5), quant=quant)
    np.testing.assert_allclose(dequantise(weight, scale, quant).numpy(), dequantised(config, weight, scale), rtol=1e-6)
    for expert in range(3):  # one expert by itself, as the loops take them
        assert torch.equal(dequantise(weight[expert], scale[expert], quant), dequantise(weight, scale, quant)[expert])


@pytest.mark.parametrize("tokens", [0, 1, FINALIZE_TOKENS, FINALIZE_TOKENS + 1])  # none, one, exactly one chunk, one row more
def test_finalize_drops_remote_slots_whatever_they_hold(tokens: int) -> None:
    y = torch.randn(tokens, 2, 3)
    y[:, 1] = torch.nan
    rows = torch.tensor([0, -1]).expand(tokens, 2)
    weights = torch.full((tokens, 2), 0.5)
    out = torch.empty(tokens, 3)
    finalize(y, rows, weights, out)
    assert torch.equal(out, y[:, 0] * 0.5)
    slots = torch.empty(tokens, 2, 3)
    finalize(y, rows, None, slots)
    assert torch.equal(slots[:, 0], y[:, 0])
    assert not slots[:, 1].any()
