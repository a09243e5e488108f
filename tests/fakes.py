"""The simulated operation under the names that tests use."""

from moe_dist.bench.simulated import SimulatedOperation as FakeOperation
from moe_dist.bench.simulated import SimulatedProbe as FakeProbe
from moe_dist.bench.simulated import tactic

__all__ = ["FakeOperation", "FakeProbe", "tactic"]
