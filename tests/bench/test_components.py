"""Where a call's time goes: the parts add up to the call they are parts of, and the result says what it is of."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch

import moe_dist as md
from moe_dist.bench.components import PARTS, _Pieces
from moe_dist.checks import bind_weights
from tests.backends.native import NATIVE, NativeBackend, NativeConfig
from tests.backends.oracle import error_of, limit_of, make_case, oracle

CONFIG = md.MoEConfig(
    routing=md.RoutingConfig(8, 2),
    experts=md.ExpertConfig(hidden_size=40, intermediate_size=24),
    quant=md.QuantConfig(dtype="fp32"),
    execution=md.ExecutionConfig(tune_max_num_tokens=64),
)
QUICK = md.MeasurementPolicy(rounds=1, sweeps=3, window=timedelta(microseconds=50))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"quant": md.QuantConfig()},
    "fp8 blocks": {"quant": md.QuantConfig(weight="fp8", block_shape=(16, 16))},  # dequantised on the way, partial blocks
    "second of two EP ranks": {"parallel": md.ParallelConfig(ep_size=2)},  # remote slots, which no product reads
    "biases, slots unsummed": {
        "experts": md.ExpertConfig(hidden_size=40, intermediate_size=24, bias=True),
        "execution": md.ExecutionConfig(do_finalize=False),
    },
    "weight on the input": {"routing": md.RoutingConfig.llama4(8)},
    "ungated": {"activation": md.ActivationConfig("relu2")},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_pieces_make_the_call(name: str) -> None:
    config = dataclasses.replace(CONFIG, **VARIANTS[name])
    case, ep_rank = make_case(config, 9), config.parallel.ep_size - 1
    truth = oracle(case, ep_rank)
    pieces = _Pieces(bind_weights(case.problem, case.share(ep_rank)), case.acts)
    assert error_of(pieces.finalize(), truth) <= limit_of(case, truth, ep_rank)


def test_all_parts_and_the_total_of_the_tactic_that_serves() -> None:
    case = make_case(CONFIG, 5, routed=False)
    native = NativeBackend()
    layer = md.MoELayer(**CONFIG, backends=NativeConfig(), extra_backends=[native])
    times = md.benchmark_all(layer, (case.acts, case.whole), policy=QUICK)
    assert times.tactic == NATIVE
    assert set(native.tokens) == {5}
    assert len(native.tokens) > 1 + QUICK.sweeps  # one to check, then as many as windows at least
    assert (times.num_tokens, times.policy, times.pieces) == (5, "eager", "segments in fp32")
    assert all(getattr(times, f"{part}_us") > 0 for part in (*PARTS, "total"))
    lines = str(times).splitlines()
    assert lines[0] == "5 tokens, eager: microseconds of one call"
    assert [line.split()[0] for line in lines[1:7]] == ["routing", "gemm1", "activation", "gemm2", "finalize", "total"]
    assert lines[6].split()[1] == f"{times.total_us:.1f}"
    assert lines[7] == "total is of native; the parts are plain torch pieces (segments in fp32) and need not add up to it"


@pytest.mark.parametrize("part", [*PARTS, "total"])
def test_one_part_alone(part: str) -> None:
    case = make_case(CONFIG, 5)
    timed = md.benchmark(md.MoELayer(**CONFIG), (case.acts, case.whole), part=part, policy=QUICK)
    assert timed.median_us > 0
    assert timed.samples == QUICK.rounds * QUICK.sweeps


@pytest.mark.parametrize("output", ["new", "given", "in_place"])
def test_the_callers_tensors_stay_what_they_are(output: str) -> None:
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(output=output))
    case = make_case(config, 5)
    before = case.acts.hidden_states.clone()
    md.benchmark_all(md.MoELayer(**config), (case.acts, case.whole), policy=QUICK)
    assert torch.equal(case.acts.hidden_states, before)


def test_what_cannot_be_timed() -> None:
    case = make_case(CONFIG, 5)
    layer, tensors = md.MoELayer(**CONFIG), (case.acts, case.whole)
    with pytest.raises(md.ConfigError, match="part is 'gemm3'; choose one of routing, gemm1, activation, gemm2, finalize, total"):
        md.benchmark(layer, tensors, part="gemm3")
    with pytest.raises(md.ConfigError, match="policy 'cuda_graph' needs a CUDA device, not 'cpu'"):
        md.benchmark_all(layer, tensors, policy=md.MeasurementPolicy("cuda_graph"))
    empty = make_case(CONFIG, 0)
    with pytest.raises(md.InputError, match="hidden_states has 0 tokens; give at least 1"):
        md.benchmark_all(layer, (empty.acts, empty.whole))
