"""Which ranks run a MoE layer in lock step, in a deployment of tp x ep x pp x dp ranks: pure arithmetic, no rank is talked to.

The launcher uses it; a plugin takes its framework's own groups instead. Of ours it imports errors alone.
"""

from __future__ import annotations

import dataclasses

from moe_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one rank stands. group: the global ranks that run its layers in lock step, itself among them."""

    replica: int
    stage: int
    ep_rank: int
    tp_rank: int
    group: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """tp cuts every expert, ep shares out whole ones; pp pipeline stages and dp replicas run other layers or other batches.

    A group is the tp x ep ranks of one stage of one replica. Expert parallelism that spans data parallelism (as vLLM's does:
    DP x TP) is a larger ep, and no replica. Neighbouring ranks share an expert, then a group, then a replica.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "pp", "dp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def world_size(self) -> int:
        return self.tp * self.ep * self.pp * self.dp

    def __str__(self) -> str:
        others = "".join(f" x --{name} {size}" for name, size in (("pp", self.pp), ("dp", self.dp)) if size > 1)
        return f"--tp {self.tp} x --ep {self.ep}{others}"

    def place(self, rank: int) -> Place:
        """ConfigError: the layout has no such rank."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside {self}, which has {self.world_size} ranks")
        size = self.tp * self.ep
        number, inside = divmod(rank, size)
        replica, stage = divmod(number, self.pp)
        ep_rank, tp_rank = divmod(inside, self.tp)
        return Place(replica, stage, ep_rank, tp_rank, tuple(range(number * size, (number + 1) * size)))
