"""Every tactic of every backend against the oracle, over a grid of sizes and routings."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

import moe_dist as md
from tests.backends.oracle import CPU, Case, error_of, limit_of, make_case, oracle, run, tactics_of

BACKENDS = ("reference", "torch_loop", "torch_grouped", "torch_dense")

TOKENS = (
    0,  # nothing to do, nothing to write
    1,  # decode: one row
    3,  # fewer rows than most tiles, odd
    64,  # whole tiles
    513,  # whole tiles and one row more; beyond a chunk of every tactic
)
EXPERTS = (
    1,  # everything goes to one
    8,  # Mixtral's
    60,  # Qwen1.5-MoE's: even, no power of two
    257,  # one more than a power of two, prime, and mostly idle at small batches
)
TOP_K = (
    1,  # one slot: no sum
    2,  # a sum
    8,  # every expert of 8; the widest of common models
)


@functools.lru_cache(maxsize=4)
def grid_case(tokens: int, experts: int, top_k: int) -> tuple[Case, np.ndarray, float]:
    config = md.MoEConfig(routing=md.RoutingConfig(experts, top_k), experts=md.ExpertConfig(hidden_size=40, intermediate_size=24))
    case = make_case(config, tokens, seed=tokens + experts)
    truth = oracle(case)
    return case, truth, limit_of(case, truth)


def refused(name: str, case: Case) -> bool:
    return md.explain_backends(case.config, CPU)[name] is not None


@pytest.mark.parametrize("name", BACKENDS)  # varies fastest, so that neighbours share a case
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(tokens, experts, top_k) for tokens in TOKENS for experts in EXPERTS for top_k in TOP_K if top_k <= experts],
)
def test_grid(name: str, tokens: int, experts: int, top_k: int) -> None:
    case, truth, limit = grid_case(tokens, experts, top_k)
    if refused(name, case):
        assert (name, experts) == ("torch_dense", 257)
        return
    for tactic in tactics_of(name, case.problem, tokens):
        assert error_of(run(tactic, case.problem, case.whole, case.acts), truth) <= limit, tactic


def check(case: Case, name: str, limit: float | None = None, ep_rank: int = 0, tp_rank: int = 0) -> list[torch.Tensor]:
    """Every tactic of `name` on one rank's share against the oracle; the results."""
    truth = oracle(case, ep_rank, tp_rank)
    limit = limit or limit_of(case, truth, ep_rank, tp_rank)
    results = []
    for tactic in tactics_of(name, case.problem, len(case.acts.hidden_states)):
        result = run(tactic, case.problem, case.share(ep_rank, tp_rank), case.acts)
        assert error_of(result, truth) <= limit, tactic
        results.append(result)
    return results


def small(*, experts: int = 8, top_k: int = 2, hidden: int = 40, inter: int = 24, **parts: object) -> md.MoEConfig:
    routing = parts.pop("routing", None) or md.RoutingConfig(experts, top_k)
    bias = bool(parts.pop("bias", False))
    return md.MoEConfig(
        routing=routing,  # type: ignore[arg-type]
        experts=md.ExpertConfig(hidden_size=hidden, intermediate_size=inter, bias=bias),
        **parts,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("hidden", "inter"),
    [
        (37, 19),  # odd rows: no alignment anywhere
        (40, 19),  # the second product alone is odd
        (511, 24),  # one below a power of two
        (40, 704),  # DeepSeek-V2-Lite's half expert: a multiple of 64, not of 128
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_odd_sizes_in_every_format(dtype: str, hidden: int, inter: int, name: str) -> None:
    check(make_case(small(hidden=hidden, inter=inter, quant=md.QuantConfig(dtype=dtype)), 9), name)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "ids",
    [
        [[3, 3]] * 70,  # one expert has all tokens, twice over: beyond a chunk of 64 rows; the others have none
        [[0, 7]] * 5,  # the first and the last expert alone
        [[5, 5], [7, 5], [5, 2]],  # an id twice in a row counts twice
        [[-1, 4], [-1, -1], [4, -1]],  # empty slots, and a row with nothing but these: zeros
    ],
)
@pytest.mark.parametrize("finalize", [True, False])
def test_uneven_routings(finalize: bool, ids: list[list[int]], name: str) -> None:
    execution = md.ExecutionConfig(do_finalize=finalize)
    check(make_case(small(execution=execution), len(ids), ids=ids), name)


@pytest.mark.parametrize("name", BACKENDS)
def test_one_row_with_an_id_twice_counts_both(name: str) -> None:
    check(make_case(small(top_k=4), 1, ids=[[5, 2, 5, 7]]), name)


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_out_of_range_count_as_remote(name: str) -> None:
    # On a GPU nobody looks at ids before a launch: a wrong one must neither crash nor touch the rest of its row.
    case = make_case(small(), 3, ids=[[8, 1], [2, -7], [1 << 30, 3]])
    clean = make_case(small(), 3, ids=[[-1, 1], [2, -1], [-1, 3]])
    for tactic in tactics_of(name, case.problem, 3):
        assert torch.equal(run(tactic, case.problem, case.whole, case.acts), run(tactic, clean.problem, clean.whole, clean.acts))


@pytest.mark.parametrize("name", BACKENDS)
def test_padded_rows_leave_the_real_row_alone(name: str) -> None:
    # 1 real row and 511 pads with equal ids, as a captured batch has them, the pads full of infinities.
    alone = make_case(small(), 1, ids=[[6, 2]])
    padded = make_case(small(), 512, ids=[[6, 2]] + [[-1, -1]] * 511)
    padded.acts.hidden_states[0] = alone.acts.hidden_states[0]
    padded.acts.hidden_states[1:] = torch.inf
    assert padded.acts.topk_weights is not None
    assert alone.acts.topk_weights is not None
    padded.acts.topk_weights[0] = alone.acts.topk_weights[0]
    truth = oracle(alone)
    for tactic in tactics_of(name, padded.problem, 512):
        result = run(tactic, padded.problem, alone.whole, padded.acts)
        assert error_of(result[:1], truth) <= limit_of(alone, truth), tactic
        assert not result[1:].any()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("experts", "parallel"),
    [
        (8, md.ParallelConfig(ep_size=4)),  # even
        (10, md.ParallelConfig(ep_size=4, uneven=True)),  # 3, 3, 2, 2
        (8, md.ParallelConfig(ep_size=2, placement="round_robin")),  # rows are no range of ids
        (8, md.ParallelConfig(tp_size=3)),  # columns alone are cut
        (8, md.ParallelConfig(tp_size=2, ep_size=2)),  # both
    ],
)
@pytest.mark.parametrize("bias", [False, True])  # w2's bias must be added once over all TP ranks
def test_each_rank_and_then_the_total(bias: bool, experts: int, parallel: md.ParallelConfig, name: str) -> None:
    case = make_case(small(experts=experts, top_k=3, bias=bias, parallel=parallel, quant=md.QuantConfig(dtype="fp32")), 17)
    ranks = [(ep, tp) for ep in range(parallel.ep_size) for tp in range(parallel.tp_size)]
    partial = {rank: check(case, name, None, *rank) for rank in reversed(ranks)}  # rank 0 last: there a global id passes for a local one
    whole = oracle(dataclasses.replace(case, config=dataclasses.replace(case.config, parallel=md.ParallelConfig())))
    for results in zip(*partial.values(), strict=True):
        assert error_of(torch.stack(results).sum(0), whole) < 1e-5


@pytest.mark.parametrize("name", BACKENDS)
def test_given_expert_map_beats_the_placement(name: str) -> None:
    case = make_case(small(), 5)
    pack = case.share()
    order = torch.tensor([4, 2, 7, 1])
    mapped = md.MoEWeightPack(w13=pack.w13[order], w2=pack.w2[order], expert_map=torch.full((8,), -1, dtype=torch.int32))
    assert mapped.expert_map is not None
    mapped.expert_map[order] = torch.arange(4, dtype=torch.int32)
    kept = [[i if i in order else -1 for i in row] for row in case.acts.topk_ids.tolist()]  # type: ignore[union-attr]
    expected = make_case(small(), 5, ids=kept)
    truth = oracle(expected)
    for tactic in tactics_of(name, case.problem, 5):
        assert error_of(run(tactic, case.problem, mapped, case.acts), truth) <= limit_of(expected, truth), tactic


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "activation",
    [
        md.ActivationConfig("swiglu"),
        md.ActivationConfig("swiglu", limit=7.0, alpha=1.702, beta=1.0),  # gpt-oss
        md.ActivationConfig("geglu", beta=0.5),
        md.ActivationConfig("relu2"),  # Nemotron-H: no gate, w13 has I rows
        md.ActivationConfig("gelu", limit=2.0),
        md.ActivationConfig("silu"),
    ],
    ids=lambda activation: f"{activation.kind}-{activation.limit}",
)
@pytest.mark.parametrize("scale", [1.0, 50.0])  # 50: a limit that is dropped shows
def test_activations_with_biases(scale: float, activation: md.ActivationConfig, name: str) -> None:
    check(make_case(small(bias=True, activation=activation), 20, scale=scale), name)


@pytest.mark.parametrize("name", ["reference", "torch_loop", "torch_grouped"])
@pytest.mark.parametrize(
    "quant",
    [
        md.QuantConfig(weight="fp8"),
        md.QuantConfig(weight="fp8", granularity="channel"),
        md.QuantConfig(weight="fp8", block_shape=(16, 8)),  # divides every size
        md.QuantConfig(weight="fp8", block_shape=(32, 32)),  # divides none: the last block of a row and a column is partial
    ],
    ids=lambda quant: f"{quant.granularity}-{quant.block_shape}",
)
def test_fp8_weights(quant: md.QuantConfig, name: str) -> None:
    check(make_case(small(quant=quant, bias=True), 20), name)


@pytest.mark.parametrize("name", BACKENDS)
def test_router_weight_on_the_input_counts_once(name: str) -> None:
    case = make_case(small(routing=md.RoutingConfig.llama4(8), activation=md.ActivationConfig("relu2")), 6)
    assert case.acts.topk_weights is not None
    case.acts.topk_weights[:] = 0.3  # squared by the activation, so that on the output it would be another number
    check(case, name)


@pytest.mark.parametrize("name", BACKENDS)
def test_fused_shared_experts(name: str) -> None:
    # Every token visits the two experts behind the routed ones.
    check(make_case(small(routing=md.RoutingConfig(6, 2, num_fused_shared_experts=2)), 9), name)


@pytest.mark.parametrize("name", BACKENDS)
def test_large_activations_in_fp16_stay_finite(name: str) -> None:
    # The gated intermediate passes fp16's 65504, the result (scaled down by w2) does not.
    config = small(quant=md.QuantConfig(dtype="fp16"), activation=md.ActivationConfig("relu2"))
    case = make_case(config, 8, scale=300.0)
    case.whole.w2.mul_(2.0**-8)
    truth = oracle(case)
    assert np.abs(truth).max() < 6e4
    for tactic in tactics_of(name, case.problem, 8):
        assert error_of(run(tactic, case.problem, case.whole, case.acts), truth) < 2e-3, tactic
