"""Operations: every candidate of every backend passes the check on this rank's share."""

import pytest
import torch

import moe_dist as md
from moe_dist.tuning.problem import BucketLadder, ProbeSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("ep_rank", [1, 0])  # ranks above 0 first: on rank 0 a global id passes for a local one
def test_every_candidate_passes_its_check(ep_rank: int, routed: bool) -> None:
    config = md.MoEConfig(
        routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=64, intermediate_size=48), parallel=md.ParallelConfig(ep_size=2)
    )
    problem = md.MoEProblem.of(config, routed=routed)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, ep_rank, 0, CPU), CPU)
    for bucket in BucketLadder((1, 16, 128)).buckets():
        probe = operation.probe(bucket.high, ProbeSpec(copies=2))
        candidates = list(operation.candidates(bucket, "eager"))
        assert operation.default(bucket, "eager") in candidates
        for tactic in candidates:
            assert probe.check(probe.bind(tactic)) is None, tactic
