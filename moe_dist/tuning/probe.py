"""What probes of any operation share: seeded draws from a named distribution, and outputs that betray who writes wrongly.

Knows no operation, clock or store; operations build their probes with it. Of ours it imports the leaves alone.
"""

from __future__ import annotations

import math

import torch

from moe_dist.errors import ConfigError
from moe_dist.tuning.problem import ProbeSpec

GUARD_BYTES = 4096  # before and behind an output: more than a kernel's tile runs over by
GUARD = 0xA5
DRAWN_ROWS = 512


def seeded(spec: ProbeSpec, num_tokens: int, copy: int) -> torch.Generator:
    """The generator of input set `copy`: equal on every rank and in every process."""
    return torch.Generator().manual_seed((spec.seed * 1_000_003 + num_tokens) * 1_009 + copy)


def draw_choices(
    spec: ProbeSpec, generator: torch.Generator, rows: int, choices: int, count: int, groups: tuple[int, int] | None = None
) -> torch.Tensor:
    """int64 [rows, count]: for each row `count` different choices of `choices`, as popular as `spec` says.

    groups (n, k): the choices lie in n equal groups, of which a row uses k. ConfigError: `spec.counts` has another length.
    """
    if spec.routing == "counts":
        if len(spec.counts) != choices:
            raise ConfigError(f"ProbeSpec.counts has {len(spec.counts)} entries for {choices} experts; give one count each")
        popularity = torch.tensor(spec.counts, dtype=torch.float64).clamp_min(1e-9)  # never seen: last resort
    elif spec.routing == "zipf":
        ranks = torch.randperm(choices, generator=torch.Generator().manual_seed(spec.seed)).double() + 1
        popularity = ranks.pow(-spec.skew)
    else:
        popularity = torch.ones(choices, dtype=torch.float64)

    def draw(log_weights: torch.Tensor, number: int) -> torch.Tensor:
        # The largest of log weight + Gumbel noise are draws without replacement.
        uniform = torch.rand(rows, log_weights.shape[-1], generator=generator, dtype=torch.float64).clamp_min(1e-12)
        return (log_weights - (-uniform.log()).log()).topk(number, dim=1).indices

    if spec.routing == "uniform" and groups is None and rows > DRAWN_ROWS:
        # What is as popular one way is so shifted: drawing every row of a large probe takes longer than a call.
        some = draw_choices(spec, generator, DRAWN_ROWS, choices, count)
        shifts = torch.randint(choices, (-(-rows // DRAWN_ROWS), 1, 1), generator=generator)
        return ((some + shifts) % choices).flatten(0, 1)[:rows]
    allowed = popularity.log().expand(rows, -1)
    if groups is not None:
        picked = draw(popularity.view(groups[0], -1).sum(1).log(), groups[1])
        barred = torch.ones(rows, groups[0], dtype=torch.bool).scatter_(1, picked, False)
        allowed = allowed.masked_fill(barred.repeat_interleave(choices // groups[0], 1), -torch.inf)
    return draw(allowed, count)


class GuardedOutputs:
    """`copies` outputs of `shape`, each between guard bytes. `tensors[i]` is what a run fills."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, copies: int, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._raw = [torch.empty(size + 2 * GUARD_BYTES, dtype=torch.uint8, device=device) for _ in range(copies)]
        self.tensors = [raw[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape) for raw in self._raw]
        self.poison()

    def poison(self) -> None:
        """NaN in every output, and whole guards again."""
        for raw, tensor in zip(self._raw, self.tensors, strict=True):
            raw.fill_(GUARD)
            tensor.fill_(torch.nan)

    def fault(self) -> str | None:
        """What is wrong with the outputs since `poison`, whatever they should hold; None: every row written, no byte outside."""
        flags = [tensor.isnan().any() for tensor in self.tensors]
        flags += [(guard != GUARD).any() for raw in self._raw for guard in (raw[:GUARD_BYTES], raw[-GUARD_BYTES:])]
        if not bool(torch.stack(flags).any()):  # one wait for the device, where nothing is wrong
            return None
        for i, (raw, tensor) in enumerate(zip(self._raw, self.tensors, strict=True)):
            unwritten = tensor.isnan().flatten(1).any(1).nonzero().flatten()
            if len(unwritten):
                return f"{len(unwritten)} of {len(tensor)} rows of input set {i} were not written or are NaN, row {int(unwritten[0])} first"
            for name, guard in (("before", raw[:GUARD_BYTES]), ("behind", raw[-GUARD_BYTES:])):
                if bool((guard != GUARD).any()):
                    return f"it wrote {name} the output of input set {i}"
        return None
