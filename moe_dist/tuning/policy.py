"""How time is taken for a mode. Data only; `measure.py` holds the clocks. Imports leaves alone."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from moe_dist.errors import ConfigError
from moe_dist.tuning.problem import modes_on

POLICIES = ("eager", "cuda_graph", "auto")
STRATEGIES = ("reduce", "shard", "reload")
OBJECTIVES = ("max", "mean")


@dataclasses.dataclass(frozen=True)
class MeasurementPolicy:
    """What a window of time contains.

    kind: "eager" counts what a serving call pays, host and device, calls back to back; "cuda_graph" captures once and
        times replays; "auto" is device time by events and serves both modes.
    rounds: times that the surviving candidates are visited after the first look. sweeps: interleaved windows of each
    candidate in a round. window: the least length of a window; a call that takes longer is timed alone.
    The key holds `kind` alone: the rest says how precisely the same thing is measured.
    """

    kind: str = "eager"
    rounds: int = 3
    sweeps: int = 3
    window: timedelta = timedelta(milliseconds=5)

    def __post_init__(self) -> None:
        if self.kind not in POLICIES:
            raise ConfigError(f"policy is {self.kind!r}; choose one of {', '.join(POLICIES)}")
        if self.rounds < 1 or self.sweeps < 1:
            raise ConfigError(f"policy rounds {self.rounds} and sweeps {self.sweeps} must be at least 1")
        if self.window <= timedelta(0):
            raise ConfigError(f"policy window is {self.window}; it must be above 0")

    def modes(self, device_type: str) -> tuple[str, ...]:
        """The modes that a measurement on `device_type` serves. ConfigError: the device has no such mode."""
        there = modes_on(device_type)
        if self.kind != "auto" and self.kind not in there:
            raise ConfigError(f"policy {self.kind!r} needs a CUDA device, not {device_type!r}; choose 'eager'")
        return there if self.kind == "auto" else (self.kind,)
