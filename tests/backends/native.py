"""A backend that only a caller knows, as a plugin brings a framework's own experts. It counts its calls and leaves their number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

import moe_dist as md
from moe_dist.backends.base import Runner

NATIVE = md.Tactic.of("native")


@dataclasses.dataclass(frozen=True)
class NativeConfig(md.BackendConfig):
    name = "native"
    fast: bool = True


class NativeBackend(md.Backend):
    """Runs anything. more: tactics beside its default; tokens: the tokens of each call so far."""

    name = "native"
    config_type = NativeConfig

    def __init__(self, *more: md.Tactic) -> None:
        self.more = more
        self.tokens: list[int] = []

    def why_not(self, problem: md.MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
        return None

    def tactics(self, problem: md.MoEProblem, bucket: md.Bucket, device: torch.device, params: md.BackendConfig) -> Sequence[md.Tactic]:
        return (NATIVE, *self.more)

    def default(self, problem: md.MoEProblem, bucket: md.Bucket | None, device: torch.device) -> md.Tactic:
        return NATIVE

    def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Runner:
        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> md.Tactic:
            self.tokens.append(len(out))
            out.fill_(len(self.tokens))
            return tactic

        return run
