"""An operation whose tactics cost what one says, so that the protocol is exercised without kernels. bench and tests import this.

Its tactics sleep: a cost in microseconds, or a fault: "oom" and "raise" in preparation, "exit" ends the process, "hang" never returns.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Mapping

import torch

from moe_dist.tuning.problem import Bucket, ProbeSpec, Problem, Tactic, Workspace


def tactic(name: str) -> Tactic:
    """A name that begins with "all-" is a collective tactic's."""
    return Tactic.of("fake", collective=name.startswith("all-"), name=name)


@dataclasses.dataclass
class SimulatedOperation:
    """costs: tactic name -> microseconds or a fault; the first is the default. noise: relative, uniform, drawn at each call."""

    name: str
    costs: Mapping[str, float | str]
    noise: float = 0.0
    seed: int = 0
    objections: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspaces: Mapping[str, int] = dataclasses.field(default_factory=dict)
    probe_fault: str = ""
    calls: list[str] = dataclasses.field(default_factory=list)
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.problem = Problem.of("fake", name=self.name)
        self.random = random.Random(self.seed)

    def default(self, bucket: Bucket, mode: str) -> Tactic:
        return tactic(next(iter(self.costs)))

    def candidates(self, bucket: Bucket, mode: str) -> list[Tactic]:
        return [tactic(name) for name in self.costs]

    def why_not(self, wanted: Tactic, bucket: Bucket) -> str | None:
        name = str(wanted["name"])
        return self.objections.get(name) if name in self.costs else f"there is no tactic {name}"

    def workspace(self, wanted: Tactic, num_tokens: int) -> Workspace:
        return Workspace(self.workspaces.get(str(wanted["name"]), 0))

    def probe(self, num_tokens: int, spec: ProbeSpec) -> SimulatedProbe:
        if self.probe_fault == "oom":
            raise MemoryError("no room for the probe")
        return SimulatedProbe(self)


@dataclasses.dataclass
class SimulatedProbe:
    operation: SimulatedOperation
    copies: int = 2

    def bind(self, wanted: Tactic) -> Callable[[int], Tactic]:
        name = str(wanted["name"])
        cost = self.operation.costs[name]
        if cost == "oom":
            raise MemoryError("no room for the tactic")
        if cost == "raise":
            raise ValueError("this tactic can't be compiled")

        def run(index: int) -> Tactic:
            self.operation.calls.append(name)
            if cost == "exit":
                os._exit(9)
            if cost == "hang":
                time.sleep(3600)
            assert not isinstance(cost, str)
            time.sleep(cost * (1 + self.operation.random.uniform(-1, 1) * self.operation.noise) / 1e6)
            return wanted

        return run

    def check(self, run: Callable[[int], Tactic]) -> str | None:
        executed = run(0)
        return "wrong output" if executed["name"] == "wrong" else None
