"""The MoE layer over real ranks: unequal shares, uneven calls, and what each rank executed, not only what it was told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, run_ranks

import moe_dist as md
from moe_dist.backends.base import MoEProblem
from moe_dist.backends.reference import compute
from moe_dist.checks import bind_weights
from moe_dist.tuning.policy import STRATEGIES

POLICY = md.MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
LADDER = md.BucketLadder((1, 2, 8, 32))


def uneven_config(num_experts: int = 10, ep_size: int = 4) -> md.MoEConfig:
    """10 experts over 4 ranks: shares of 3, 3, 2 and 2."""
    return md.MoEConfig(
        routing=md.RoutingConfig(num_experts, 3),
        experts=md.ExpertConfig(hidden_size=32, intermediate_size=48),
        quant=md.QuantConfig(dtype="fp32"),
        parallel=md.ParallelConfig(ep_size=ep_size, uneven=True),
        execution=md.ExecutionConfig(tune_max_num_tokens=32),
    )


def tokens(config: md.MoEConfig, count: int, seed: int) -> md.MoEActivationPack:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, config.routing.num_experts, generator=generator).argsort(1)[:, : config.routing.top_k]
    return md.MoEActivationPack(
        hidden_states=torch.randn(count, config.experts.hidden_size, generator=generator),
        topk_ids=ids.int(),
        topk_weights=torch.rand(count, config.routing.top_k, generator=generator),
    )


def serve_uneven(rank: Rank, strategy: str, counts: Sequence[Sequence[int]]) -> Any:
    """Tune over a gloo group, then serve `counts[rank]`. Gives the digest, what ran for each call, and this rank's partial sum."""
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    config = uneven_config(ep_size=rank.size)
    problem = MoEProblem.of(config, routed=True)
    weights = md.make_random_weights(problem, rank.index, 0, torch.device("cpu"), seed=7)
    assert weights.w13.shape[0] == (3, 3, 2, 2)[rank.index]
    with md.Tuner(
        store=str(rank.folder / "store"), group=dist.group.WORLD, strategy=strategy, ladder=LADDER, policy=POLICY, device="cpu",
        progress_timeout=timedelta(seconds=20), deployment="uneven",
    ) as tuner:  # fmt: skip
        tuner.record(md.MoEOperation(problem, weights, torch.device("cpu")))
        report = tuner.run_pass()
    layer = md.MoELayer(tuner=tuner, **config)
    executed = []
    for count in counts[rank.index]:
        acts = tokens(config, count, seed=count)
        layer((acts, weights))
        executed.append(str(layer.lookup(count)))
    shared = tokens(config, 5, seed=99)
    partial = layer((shared, weights))
    return report.digest, executed, partial.numpy(), [(str(row.cell.bucket), row.winner is not None) for row in report.rows]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unequal_shares_and_uneven_calls_serve_one_table(strategy: str, tmp_path: Path) -> None:
    # Calls that differ per rank, some empty, some beyond the ladder (33): the same count must run the same tactic everywhere.
    counts = [[1, 2, 7, 32, 33, 0], [32, 33, 0, 1, 2, 7], [0, 7, 1, 2, 32, 33], [7, 0, 33, 32, 1, 2]]
    outcomes = run_ranks(serve_uneven, 4, tmp_path, strategy, counts, deadline=120)
    assert [outcome.error for outcome in outcomes] == [""] * 4, outcomes
    assert len({outcome.value[0] for outcome in outcomes}) == 1
    assert all(tuned for outcome in outcomes for _, tuned in outcome.value[3])
    ran: dict[int, set[str]] = {}
    for calls, outcome in zip(counts, outcomes, strict=True):
        for count, tactic in zip(calls, outcome.value[1], strict=True):
            ran.setdefault(count, set()).add(tactic)
    assert set(ran) == {0, 1, 2, 7, 32, 33}
    assert all(len(tactics) == 1 for tactics in ran.values()), ran
    # Each rank's partial sum is right, ranks above 0 first, then the total.
    config = uneven_config()
    whole = dataclasses.replace(config, parallel=md.ParallelConfig())
    acts = tokens(config, 5, seed=99)
    total = torch.zeros(5, 32)
    for index in (3, 2, 1, 0):
        problem = MoEProblem.of(config, routed=True)
        weights = md.make_random_weights(problem, index, 0, torch.device("cpu"), seed=7)
        truth = compute(bind_weights(problem, weights), acts)
        partial = torch.from_numpy(outcomes[index].value[2])
        torch.testing.assert_close(partial, truth, rtol=1e-4, atol=1e-4)
        total += partial
    whole_problem = MoEProblem.of(whole, routed=True)
    whole_weights = md.make_random_weights(whole_problem, 0, 0, torch.device("cpu"), seed=7)
    torch.testing.assert_close(total, compute(bind_weights(whole_problem, whole_weights), acts), rtol=1e-4, atol=1e-4)
