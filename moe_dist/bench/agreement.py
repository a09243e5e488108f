"""Do all ranks run the same tactic? Real ranks tune with noisy clocks, then serve; what each of them executed is compared.

Owns the divergence table: a number of ranks tune apart ("unprotected") or by a strategy of the tuner, then call their layers
with token counts that differ between ranks. A key (problem, mode, bucket) has diverged when two executions of it, on any
ranks, were of different tactics. `faults.py` has the other half of `moe-dist bench agreement`. cli imports this.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.torch_loop import TorchLoopBackend
from moe_dist.bench.ranks import Rank, run_ranks
from moe_dist.config import BackendConfig, BackendOptions, ExecutionConfig, ExpertConfig, MoEConfig, QuantConfig, RoutingConfig
from moe_dist.errors import ConfigError
from moe_dist.layer import MoELayer
from moe_dist.operation import MoEOperation, make_random_weights
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, ProbeSpec, Tactic
from moe_dist.tuning.tuner import Tuner

UNPROTECTED = "unprotected"
ARMS = (UNPROTECTED, *STRATEGIES)
LADDER = BucketLadder((1, 4, 16, 64, 256))
# Five variants of nearly equal cost under a clock that is off by up to half: which one looks fastest is chance on each rank.
COSTS_US = (200.0, 196.0, 192.0, 188.0, 184.0)
NOISE = 0.5
POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(microseconds=200))
CPU = torch.device("cpu")
DEADLINE_S = 900.0


@dataclasses.dataclass(frozen=True)
class NoisyConfig(BackendConfig):
    name = "noisy"


class NoisyBackend(Backend):
    """Right results in `len(COSTS_US)` variants that differ in nothing but their cost, which is drawn anew at every call.

    executed: the tactic of every call, in order. Unlike other backends' instances it keeps this; one lives in each rank.
    """

    name = "noisy"
    config_type = NoisyConfig

    def __init__(self, seed: int) -> None:
        self.executed: list[Tactic] = []
        self.measuring = True
        self._random = random.Random(seed)

    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        return None

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        return [Tactic.of(self.name, variant=variant) for variant in range(len(COSTS_US))]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        return Tactic.of(self.name, variant=0)

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        loop = TorchLoopBackend()
        compute = loop.bind(layer, loop.default(layer.problem, None, CPU))
        cost_us = COSTS_US[int(tactic["variant"] or 0)]

        def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
            compute(acts, out)
            if self.measuring:
                time.sleep(cost_us * (1 + self._random.uniform(-NOISE, NOISE)) / 1e6)
            self.executed.append(tactic)
            return tactic

        return run


def diverged_table(ranks: Iterable[int], keys: int, calls: int, note: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Rows of strategy, ranks, keys, calls, diverged, seconds: one for each number of ranks and arm.

    keys: a multiple of the ladder's buckets. calls: of each rank. note: takes a line for each finished row.
    ConfigError: a number is out of range. RankHangs, RuntimeError: a rank did not end, or failed.
    """
    buckets = len(LADDER.bounds)
    if keys < buckets or keys % buckets:
        raise ConfigError(f"keys is {keys}; it must be a multiple of the {buckets} buckets of a problem")
    if calls < 1:
        raise ConfigError(f"calls is {calls}; it must be at least 1")
    ranks, rows = list(ranks), []
    if (wrong := next((size for size in ranks if size < 2), None)) is not None:
        raise ConfigError(f"ranks is {wrong}; divergence needs at least 2")
    for size in ranks:
        for arm in ARMS:
            rows.append(_row(arm, size, keys, calls))
            note(f"{arm}, {size} ranks: {rows[-1]['diverged']} of {rows[-1]['keys']} keys diverged ({rows[-1]['seconds']} s)")
    return rows


def _row(arm: str, size: int, keys: int, calls: int) -> dict[str, Any]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moe-dist-agreement-") as folder:
        outcomes = run_ranks(_tune_and_serve, size, Path(folder), arm, keys // len(LADDER.bounds), calls, deadline=DEADLINE_S)
    if failed := [f"rank {rank}: {outcome.error}: {outcome.message}" for rank, outcome in enumerate(outcomes) if outcome.error]:
        raise RuntimeError(f"{arm} over {size} ranks: " + "; ".join(failed))
    ran: dict[tuple[int, str, int], set[str]] = {}
    on_ranks: dict[tuple[int, str, int], int] = {}
    for outcome in outcomes:
        for key, tactics in outcome.value.items():
            ran.setdefault(key, set()).update(tactics)
            on_ranks[key] = on_ranks.get(key, 0) + 1
    compared = [key for key in ran if on_ranks[key] >= 2]
    return {
        "strategy": arm,
        "ranks": size,
        "keys": len(compared),
        "calls": calls,
        "diverged": sum(len(ran[key]) > 1 for key in compared),
        "seconds": round(time.monotonic() - started, 1),
    }


def _config(problem: int) -> MoEConfig:
    return MoEConfig(
        routing=RoutingConfig(4, 2),
        experts=ExpertConfig(hidden_size=16, intermediate_size=8 * (problem + 1)),
        quant=QuantConfig(dtype="fp32"),
        backends=BackendOptions((NoisyConfig(),)),
        execution=ExecutionConfig(tune_max_num_tokens=LADDER.max_num_tokens),
    )


def _tune_and_serve(rank: Rank, arm: str, problems: int, calls: int) -> dict[tuple[int, str, int], set[str]]:
    """One rank: tune `problems` layers, then serve. {(problem, mode, bucket's end): names of the tactics that were executed}."""
    store = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    backend = NoisyBackend(seed=rank.index)
    apart = arm == UNPROTECTED
    tuner = Tuner(
        store="memory:" if apart else str(rank.folder / "store"),
        group=None if apart else dist.group.WORLD,
        strategy="reduce" if apart else arm,
        policy=POLICY,
        ladder=LADDER,
        probe=ProbeSpec(copies=1),
        deployment=f"agreement-{arm}",
        device=CPU,
        progress_timeout=timedelta(seconds=120),  # many ranks share few cores: nobody is to be lost here
    )
    configs = [_config(problem) for problem in range(problems)]
    weights = [make_random_weights(MoEProblem.of(config, routed=True), 0, 0, CPU, seed=1) for config in configs]
    for config, pack in zip(configs, weights, strict=True):
        tuner.record(MoEOperation(MoEProblem.of(config, routed=True), pack, CPU, config.options, [backend]))
    tuner.run_pass()
    layers = [MoELayer(tuner=tuner, extra_backends=[backend], **config) for config in configs]
    backend.measuring = False
    backend.executed.clear()
    draw = random.Random(1_000 + rank.index)  # uneven: every rank draws its own token counts
    ran: dict[tuple[int, str, int], set[str]] = {}
    for call in range(calls):
        problem = call % problems
        bucket = draw.choice(LADDER.buckets())
        acts = _activations(draw.randint(bucket.low, bucket.high))
        layers[problem]((acts, weights[problem]), mode="eager")
        ran.setdefault((problem, "eager", bucket.high), set()).add(str(backend.executed[-1]))
    tuner.close()
    assert len(backend.executed) == calls, "a call ran more or less than one tactic"
    return ran


def _activations(num_tokens: int) -> MoEActivationPack:
    return MoEActivationPack(
        hidden_states=torch.ones(num_tokens, 16),
        topk_ids=torch.tensor([[0, 1]], dtype=torch.int32).repeat(num_tokens, 1),
        topk_weights=torch.full((num_tokens, 2), 0.5),
    )
