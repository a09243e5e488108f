"""A backend with a collective tactic for tests: its calls meet through the rendezvous, bounded, as a kernel's do on its device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import moe_dist as md
from moe_dist.backends.base import MoEProblem, Runner
from moe_dist.backends.reference import compute

PLAIN, MEET = md.Tactic.of("meeting"), md.Tactic.of("meeting", collective=True)


class MeetingConfig(md.BackendConfig):
    name = "meeting"


class MeetingBackend(md.Backend):
    """The reference in two tactics: `PLAIN`, the default, takes 30 ms longer; `MEET` waits for all ranks first, for `patience_s`.

    store: a client of the rendezvous. executed: (tactic, tokens) of every call, so that a test sees what ran.
    """

    name = "meeting"
    config_type = MeetingConfig

    def __init__(self, store: Any, scope: str, rank: int, names: Sequence[int], patience_s: float = 20.0) -> None:
        self._store, self._scope, self._rank, self._names, self._patience_s = store.clone(), scope, rank, tuple(names), patience_s
        self._calls = 0
        self.executed: list[tuple[md.Tactic, int]] = []

    def why_not(self, problem: MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
        return None

    def tactics(self, problem: MoEProblem, bucket: md.Bucket, device: torch.device, params: md.BackendConfig) -> Sequence[md.Tactic]:
        return [PLAIN, MEET]

    def default(self, problem: MoEProblem, bucket: md.Bucket | None, device: torch.device) -> md.Tactic:
        return PLAIN

    def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Runner:
        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> md.Tactic:
            if tactic.collective:
                self._meet()
            else:
                time.sleep(0.03)
            out.copy_(compute(layer, acts))
            self.executed.append((tactic, len(out)))
            return tactic

        return run

    def _meet(self) -> None:
        self._calls += 1
        keys = [f"{self._scope}/{self._calls}/{rank}" for rank in range(len(self._names))]
        self._store.set(keys[self._rank], "here")
        deadline = time.monotonic() + self._patience_s
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [name for name, key in zip(self._names, keys, strict=True) if not self._store.check([key])]
                raise md.RankLost(f"rank {', '.join(map(str, missing))} lost in meeting {self._calls}", missing)
            time.sleep(0.0005)
