"""The triton backend as the layer calls it: bound to checked weights, from logits or ids, against the reference backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import moe_dist_kernels
import pytest
import torch
from moe_dist_kernels import RouterShape
from truth import relative_error

from moe_dist.backends.base import MoEProblem
from moe_dist.backends.reference import compute
from moe_dist.backends.triton import TritonBackend, TritonConfig
from moe_dist.checks import bind_weights, output_shape
from moe_dist.config import ActivationConfig, ExecutionConfig, ExpertConfig, MoEConfig, ParallelConfig, QuantConfig, RoutingConfig
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.tuning.problem import Bucket, Tactic

BACKEND = TritonBackend()
HIDDEN, INTER = 48, 16  # small, and 48 is no multiple of the default depths: the interpreter pays for every program


def layer_of(config: MoEConfig, device: torch.device, *, routed: bool, ep_rank: int = 0) -> Any:
    problem = MoEProblem.of(config, routed=routed)
    experts = len(problem.local_experts(ep_rank))
    gates = 2 if config.activation.gated else 1
    weights = MoEWeightPack(
        w13=torch.randn(experts, gates * problem.local_intermediate, HIDDEN, device=device, dtype=problem.dtype) * 0.2,
        w2=torch.randn(experts, HIDDEN, problem.local_intermediate, device=device, dtype=problem.dtype) * 0.2,
        ep_rank=ep_rank,
    )
    if config.routing.correction_bias:
        weights.correction_bias = torch.randn(config.routing.num_experts, device=device)
    return bind_weights(problem, weights)


def check(layer: Any, tactic: Tactic, acts: MoEActivationPack, bound: float = 1e-5) -> None:
    device = acts.hidden_states.device
    tokens = acts.hidden_states.shape[0]
    out = torch.full(output_shape(layer.problem, tokens), torch.nan, dtype=layer.problem.dtype, device=device)
    assert BACKEND.bind(layer, tactic)(acts, out) == tactic
    assert out.isfinite().all()
    if tokens:
        assert relative_error(out, compute(layer, acts)) < bound


def config_of(experts: int, top_k: int, **parts: Any) -> MoEConfig:
    fields: dict[str, Any] = {
        "routing": RoutingConfig(experts, top_k),
        "experts": ExpertConfig(hidden_size=HIDDEN, intermediate_size=INTER),
        "quant": QuantConfig(dtype="fp32"),
    }
    return MoEConfig(**(fields | parts))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [
        (0, 8, 2),  # nothing to do
        (1, 1, 1),  # everything at its least
        (1, 257, 8),  # the small path; one past a power of two
        (3, 60, 8),  # no power of two
        (64, 8, 2),  # several rows an expert
        (64, 257, 1),  # more experts than slots
        (513, 8, 1),  # one past a power of two of tokens; tiles of 64 rows
    ],
)
def test_defaults_agree_with_the_reference(tokens: int, experts: int, top_k: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    layer = layer_of(config_of(experts, top_k), device, routed=False)
    tactic = BACKEND.default(layer.problem, Bucket(1, max(1, tokens)), device)
    acts = MoEActivationPack(
        hidden_states=torch.randn(tokens, HIDDEN, device=device), router_logits=torch.randn(tokens, experts, device=device)
    )
    check(layer, tactic, acts)


@pytest.mark.parametrize("tokens", [2, 40])  # the small path and the sorted one
@pytest.mark.parametrize("finalize", [True, False])
def test_a_rank_of_an_uneven_share(tokens: int, finalize: bool, device: torch.device) -> None:
    """10 experts over 4 ranks: rank 1 holds 3, 4 and 5; most slots are remote, and some tokens have none here."""
    torch.manual_seed(0)
    config = config_of(10, 2, parallel=ParallelConfig(ep_size=4, uneven=True), execution=ExecutionConfig(do_finalize=finalize))
    layer = layer_of(config, device, routed=True, ep_rank=1)
    ids = torch.stack([torch.randperm(10)[:2] for _ in range(tokens)]).to(device)
    acts = MoEActivationPack(
        hidden_states=torch.randn(tokens, HIDDEN, device=device), topk_ids=ids, topk_weights=torch.rand(tokens, 2, device=device)
    )
    check(layer, BACKEND.default(layer.problem, Bucket(tokens, tokens), device), acts)


@pytest.mark.parametrize(
    "parts",
    [
        {"routing": RoutingConfig.deepseek_v3(16, 4, n_group=4, topk_group=2)},
        {"routing": RoutingConfig.llama4(8)},
        {"routing": RoutingConfig(8, 2, num_fused_shared_experts=1, routed_scaling_factor=2.5)},
        {"activation": ActivationConfig("relu2")},
    ],
    ids=["deepseek", "llama4", "fused_shared", "relu2"],
)
def test_models_from_logits(parts: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(0)
    config = config_of(16, 4, **parts)
    layer = layer_of(config, device, routed=False)
    logits = torch.randn(5, config.routing.num_experts, device=device)
    acts = MoEActivationPack(hidden_states=torch.randn(5, HIDDEN, device=device), router_logits=logits)
    for high in (1, 5000):  # a decode default and a prefill default, both valid for 5 tokens
        check(layer, BACKEND.default(layer.problem, Bucket(1, high), device), acts)


def test_logits_of_each_dtype_and_ids_meet_experts_of_their_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bound layer, called with fp32 logits, then fp16 ones, then fp32 again: a launch reads what it was compiled for."""
    torch.manual_seed(0)
    bound: list[torch.dtype] = []

    class Recorded(moe_dist_kernels.Experts):
        def __init__(self, *arguments: Any, router: RouterShape | None = None, **named: Any) -> None:
            super().__init__(*arguments, router=router, **named)
            assert router is not None
            bound.append(router.logits_dtype)

    monkeypatch.setattr(moe_dist_kernels, "Experts", Recorded)
    layer = layer_of(config_of(8, 2), device, routed=False)
    run = BACKEND.bind(layer, BACKEND.default(layer.problem, Bucket(1, 64), device))
    for dtype in (torch.float32, torch.float16, torch.float32):
        acts = MoEActivationPack(
            hidden_states=torch.randn(3, HIDDEN, device=device), router_logits=torch.randn(3, 8, device=device).to(dtype)
        )
        out = torch.full((3, HIDDEN), torch.nan, device=device)
        run(acts, out)
        assert relative_error(out, compute(layer, acts)) < 1e-3
    assert bound == [torch.float32, torch.float16]


def test_one_row_gives_the_same_bits_in_every_batch(device: torch.device) -> None:
    """The batch-invariant family: a row alone, and among 7 and 64."""
    torch.manual_seed(0)
    layer = layer_of(config_of(8, 2, execution=ExecutionConfig(batch_invariant=True)), device, routed=False)
    x, logits = torch.randn(64, HIDDEN, device=device), torch.randn(64, 8, device=device)
    rows = []
    for tokens in (1, 7, 64):
        tactic = BACKEND.default(layer.problem, Bucket(1, tokens), device)
        out = torch.full((tokens, HIDDEN), torch.nan, device=device)
        BACKEND.bind(layer, tactic)(MoEActivationPack(hidden_states=x[:tokens], router_logits=logits[:tokens]), out)
        rows.append(out[0])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_bf16_is_refused_under_the_interpreter_alone(device: torch.device) -> None:
    problem = MoEProblem.of(dataclasses.replace(config_of(8, 2), quant=QuantConfig()), routed=True)
    reason = BACKEND.why_not(problem, device, TritonConfig())
    if device.type == "cpu":
        assert reason == "Triton's interpreter computes bf16 wrongly; interpret in fp32 or fp16"
    else:
        assert reason is None
