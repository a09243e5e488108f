"""The torch backends and the layer on a GPU: right, safe for ids that nobody checked, and free of waits where they are captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import moe_dist as md
from moe_dist.backends.base import MoEProblem
from moe_dist.operation import probe_inputs

pytestmark = pytest.mark.gpu
CONFIG = md.MoEConfig(
    routing=md.RoutingConfig(16, 4), experts=md.ExpertConfig(hidden_size=256, intermediate_size=128), parallel=md.ParallelConfig(ep_size=2)
)
TORCH = md.TorchGroupedConfig() | md.TorchLoopConfig() | md.TorchDenseConfig()
GROUPED = md.TorchGroupedConfig(methods=("grouped_mm",))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def no_waits() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def tensors(
    config: md.MoEConfig, device: torch.device, tokens: int = 33, *, routed: bool = True
) -> tuple[md.MoEActivationPack, md.MoEWeightPack]:
    problem = MoEProblem.of(config, routed=routed)
    return probe_inputs(problem, tokens, md.ProbeSpec(), 0, device), md.make_random_weights(problem, 1, 0, device)


@pytest.mark.parametrize(
    "quant",
    [md.QuantConfig(), md.QuantConfig(dtype="fp16"), md.QuantConfig(dtype="fp32"), md.QuantConfig(weight="fp8", granularity="block")],
    ids=lambda quant: f"{quant.dtype}-{quant.weight}",
)
@pytest.mark.parametrize("routed", [True, False])
def test_every_candidate_passes_its_check(routed: bool, quant: md.QuantConfig, device: torch.device) -> None:
    problem = MoEProblem.of(dataclasses.replace(CONFIG, quant=quant), routed=routed)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 1, 0, device), device, TORCH)
    for tokens in (1, 33, 513):  # decode, ragged, beyond every chunk
        bucket = md.Bucket(tokens, tokens)
        probe = operation.probe(tokens, md.ProbeSpec(copies=2))
        for tactic in operation.candidates(bucket, "eager"):
            assert probe.check(probe.bind(tactic)) is None, tactic


@pytest.mark.parametrize("option", list(TORCH), ids=lambda option: option.name)
def test_ids_out_of_range_count_as_remote(option: md.BackendConfig, device: torch.device) -> None:
    acts, weights = tensors(CONFIG, device)
    assert acts.topk_ids is not None
    clean, wild = acts.topk_ids.clone(), acts.topk_ids.clone()
    clean[::3, 1], wild[::3, 1] = -1, 1 << 30
    clean[1::3, 2], wild[1::3, 2] = -1, -5
    results = [md.moe_layer((dataclasses.replace(acts, topk_ids=ids), weights), **CONFIG, backends=option) for ids in (clean, wild)]
    torch.cuda.synchronize()
    assert torch.equal(*results)


def test_ids_are_checked_where_waiting_is_allowed(device: torch.device) -> None:
    acts, weights = tensors(CONFIG, device)
    wrong = dataclasses.replace(acts, topk_ids=torch.full_like(acts.topk_ids, 16))  # type: ignore[arg-type]
    with pytest.raises(md.InputError, match="topk_ids holds 16; ids are global, 0 to 15"):
        md.MoELayer(**CONFIG, backends=GROUPED).get_tuned_layer((wrong, weights))


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.usefixtures("no_waits")
def test_a_serving_call_never_waits(routed: bool, device: torch.device) -> None:
    torch.cuda.set_sync_debug_mode("default")
    acts, weights = tensors(CONFIG, device, routed=routed)
    layer = md.MoELayer(**CONFIG, backends=GROUPED)
    layer((acts, weights))  # binds
    torch.cuda.set_sync_debug_mode("error")
    layer((acts, weights))
    layer((acts, weights), mode="cuda_graph")


def test_the_default_is_captured_and_replayed(device: torch.device) -> None:
    acts, weights = tensors(CONFIG, device)
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(output="given"), backends=md.TorchGroupedConfig())
    layer, out = md.MoELayer(**config), torch.empty_like(acts.hidden_states)
    expected = layer((acts, weights), mode="cuda_graph", out=out).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer((acts, weights), mode="cuda_graph", out=out)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_nothing_is_recorded_under_capture(device: torch.device) -> None:
    acts, weights = tensors(CONFIG, device)
    md.moe_layer((acts, weights), **CONFIG, backends=GROUPED)
    with md.autotune(ladder=md.BucketLadder((8,)), device=device) as tuner:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            md.moe_layer((acts, weights), **CONFIG, backends=GROUPED)
    assert not tuner.epoch.winners
