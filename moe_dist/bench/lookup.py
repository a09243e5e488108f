"""What finding the tactic of a call costs a serving thread: an index by token count, and nothing else. cli imports this."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from moe_dist.backends.base import MoEProblem
from moe_dist.checks import bind_weights
from moe_dist.config import ExecutionConfig, ExpertConfig, MoEConfig, RoutingConfig
from moe_dist.layer import MoELayer, ServingIndex
from moe_dist.operation import MoEOperation, make_random_weights
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner

CALLS, REPEATS = 10_000, 7
CPU = torch.device("cpu")


def lookup_table() -> list[dict[str, Any]]:
    """Rows of part, lookups, nanoseconds (of one lookup, the least over repeats: what the code costs on a busy machine, too).

    "index": from a token count to a bound tactic, as every call does it. "MoELayer.lookup": the same from outside, with the
    check that the epoch is still the tuner's.
    """
    config = MoEConfig(
        routing=RoutingConfig(8, 2),
        experts=ExpertConfig(hidden_size=32, intermediate_size=32),
        execution=ExecutionConfig(tune_max_num_tokens=64),
    )
    problem = MoEProblem.of(config, routed=True)
    weights = make_random_weights(problem, 0, 0, CPU)
    ladder = BucketLadder.powers_of_two(64)
    policy = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(microseconds=100))
    with Tuner(ladder=ladder, policy=policy, device=CPU) as tuner:
        tuner.record(MoEOperation(problem, weights, CPU))
        tuner.run_pass()
    acts = MoEActivationPack(
        hidden_states=torch.zeros(1, 32, dtype=problem.dtype), topk_ids=torch.tensor([[0, 1]]).int(), topk_weights=torch.ones(1, 2)
    )
    layer = MoELayer(tuner=tuner, **config).get_tuned_layer((acts, weights))
    layer((acts, weights))
    index = ServingIndex(bind_weights(problem, weights), config.options, (), tuner.epoch)
    pick, lookup = index.pick, layer.lookup
    counts = [1 + index % 64 for index in range(CALLS)]

    def nanoseconds(call: Any) -> float:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter_ns()
            for count in counts:
                call(count)
            times.append((time.perf_counter_ns() - start) / CALLS)
        return round(min(times), 1)

    return [
        {"part": "index", "lookups": CALLS, "nanoseconds": nanoseconds(lambda count: pick(count, "eager", None))},
        {"part": "MoELayer.lookup", "lookups": CALLS, "nanoseconds": nanoseconds(lookup)},
    ]
