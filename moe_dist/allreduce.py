"""Finalize + all-reduce between CPU processes: sum each token's expert rows, then sum over ranks. An operation, and its serving call.

Every tactic talks to peers. `gloo` is the framework's way and the default; `shared_memory` meets its peers in the group's arena.
Knows no clock or store of winners; callers and tests import this.
Shapes: T tokens, K slots, H hidden, R ranks, n = T * H elements.

    one_shot: every rank writes its n into slot r of every peer's data, then sums the R slots of its own.   R * n a rank
    two_shot: every rank writes its n into its own data; rank r sums part r over all; all collect the parts.    n a rank
Example, 2 ranks with [1, 2, 3] and [10, 20, 30]: parts of 2 and 1 elements; rank 0 sums [11, 22], rank 1 [33].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_dist.backends.base import TORCH_DTYPES
from moe_dist.distributed.symmetric import Arena, Refused, why_no_arena
from moe_dist.errors import ConfigError, GroupError, InputError, RankLost, TunerStateError
from moe_dist.operation import FLOOR, TOLERANCE
from moe_dist.tuning.probe import GuardedOutputs, seeded
from moe_dist.tuning.problem import Bucket, Cell, Epoch, ProbeSpec, Problem, Tactic, Workspace
from moe_dist.tuning.tuner import Tuner

GLOO = Tactic.of("gloo", collective=True)
ONE_SHOT, TWO_SHOT = (Tactic.of("shared_memory", collective=True, algorithm=name) for name in ("one_shot", "two_shot"))
TACTICS = (GLOO, ONE_SHOT, TWO_SHOT)
# How long a call waits for a peer: below the 60 s after which a pass takes a rank for lost, far above any rank's lag in lock step.
PATIENCE = timedelta(seconds=20)
PROBE_ROWS = 61  # rows that are drawn; a prime, so that a tile that is taken for another shows

# run(rows_TKH, out_TH)
Runner = Callable[[torch.Tensor, torch.Tensor], None]


class FinalizeAllReduce:
    """The operation on one rank: rows [T, K, H], weighted already, to their sum over slots and ranks [T, H].

    slots: K. dtype: of rows and result; sums are in fp32. group: the ranks that call in lock step; None: this process alone.
    patience: how long a call waits for a peer before it raises RankLost.
    """

    device = torch.device("cpu")

    def __init__(
        self, *, hidden_size: int, slots: int, dtype: str = "bf16", group: dist.ProcessGroup | None = None, patience: timedelta = PATIENCE
    ) -> None:
        if hidden_size < 1 or slots < 1 or dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"hidden_size {hidden_size} and slots {slots} must be at least 1, dtype {dtype!r} one of {list(TORCH_DTYPES)}"
            )
        self.hidden_size, self.slots, self.dtype = hidden_size, slots, TORCH_DTYPES[dtype]
        self.group, self.patience = group, patience
        self.size, self.rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
        self.problem = Problem.of("finalize_all_reduce", hidden_size=hidden_size, slots=slots, dtype=dtype, ranks=self.size)
        self._arena: Arena | Refused | None = None

    def default(self, bucket: Bucket, mode: str) -> Tactic:
        return GLOO

    def candidates(self, bucket: Bucket, mode: str) -> Iterable[Tactic]:
        return [tactic for tactic in TACTICS if self.why_not(tactic, bucket) is None]

    def why_not(self, tactic: Tactic, bucket: Bucket) -> str | None:
        if tactic not in TACTICS:
            return f"finalize + all-reduce has no tactic {tactic}"
        return None if tactic == GLOO else why_no_arena(self.size)

    def workspace(self, tactic: Tactic, num_tokens: int) -> Workspace:
        """Bytes of this rank's symmetric memory."""
        nbytes = num_tokens * self.hidden_size * self.dtype.itemsize
        return Workspace() if tactic == GLOO else Workspace(nbytes * (self.size if tactic == ONE_SHOT else 1), symmetric=True)

    def use_arena(self, arena: Arena | Refused | None) -> None:
        """The memory of what `probe` binds from now on."""
        self._arena = arena

    def probe(self, num_tokens: int, spec: ProbeSpec) -> FinalizeAllReduceProbe:
        return FinalizeAllReduceProbe(self, num_tokens, spec)

    def bind(self, tactic: Tactic, num_tokens: int, arena: Arena | Refused | None) -> Runner:
        """A runner for up to `num_tokens` tokens. TunerStateError: there is no arena with so much room, and why."""
        if tactic == GLOO:
            return self._gloo
        needed = self.workspace(tactic, num_tokens).nbytes
        if not isinstance(arena, Arena) or arena.nbytes < needed:
            unknown = "record the operation before the pass or reload that brings its epoch"
            why = arena.reason if isinstance(arena, Refused) else unknown
            raise TunerStateError(f"{tactic} has no symmetric memory for its {needed} bytes: {why}")
        run = _one_shot if tactic == ONE_SHOT else _two_shot
        return lambda rows, out: run(arena, self.patience.total_seconds(), rows, out)

    def _gloo(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        torch.sum(rows, 1, out=out)
        if self.group is None:
            return
        try:
            work = dist.all_reduce(out, group=self.group, async_op=True)
            assert work is not None
            work.wait(self.patience)
        except RuntimeError as error:  # a peer's connection closed, or it never came; gloo does not say whose
            raise RankLost(f"a rank was lost in gloo's all-reduce of {_shape(out)}: {str(error).partition(chr(10))[0][:200]}") from error


def _one_shot(arena: Arena, patience_s: float, rows: torch.Tensor, out: torch.Tensor) -> None:
    count, call = out.numel(), f"one_shot of {_shape(out)}"
    partial = torch.sum(rows, 1, dtype=torch.float32).flatten()
    arena.wait(call, patience_s)  # peers may still read what the last call left in their data
    for peer in range(arena.size):
        arena.data(peer, out.dtype, count * arena.size)[arena.rank * count :][:count].copy_(partial)
    arena.post(f"{call}, written")
    arena.wait(call, patience_s)
    slots = arena.data(arena.rank, out.dtype, count * arena.size).view(arena.size, count)
    out.view(-1).copy_(torch.sum(slots, 0, dtype=torch.float32))
    arena.post(f"{call}, read")


def _two_shot(arena: Arena, patience_s: float, rows: torch.Tensor, out: torch.Tensor) -> None:
    count, call = out.numel(), f"two_shot of {_shape(out)}"
    share = -(-count // arena.size)
    parts = [slice(min(rank * share, count), min((rank + 1) * share, count)) for rank in range(arena.size)]
    partial = torch.sum(rows, 1, dtype=torch.float32).flatten()
    arena.wait(call, patience_s)  # peers may still read what the last call left in this rank's data
    data = [arena.data(rank, out.dtype, count) for rank in range(arena.size)]
    data[arena.rank].copy_(partial)
    arena.post(f"{call}, written")
    arena.wait(call, patience_s)
    mine = parts[arena.rank]  # read and written by this rank alone, in its own data
    data[arena.rank][mine] = torch.stack([peer[mine] for peer in data]).sum(0, dtype=torch.float32)
    arena.post(f"{call}, summed")
    arena.wait(call, patience_s)
    for peer, part in zip(data, parts, strict=True):
        out.view(-1)[part] = peer[part]
    arena.post(f"{call}, read")


class FinalizeAllReduceProbe:
    """Seeded rows, different on every rank and known to all, so that each rank has the truth of the whole sum."""

    def __init__(self, operation: FinalizeAllReduce, num_tokens: int, spec: ProbeSpec) -> None:
        self.copies, self._num_tokens = spec.copies, num_tokens
        self._operation = operation
        size, dtype = operation.size, operation.dtype
        drawn_rows = min(num_tokens, PROBE_ROWS)
        at = torch.arange(num_tokens) % drawn_rows
        self.inputs, self._truths, yardsticks = [], list[torch.Tensor](), []
        for copy in range(spec.copies):
            generator = seeded(spec, num_tokens, copy)
            drawn = torch.randn(size, drawn_rows, operation.slots, operation.hidden_size, generator=generator).to(dtype)
            self.inputs.append(drawn[operation.rank][at])
            self._truths.append(drawn.float().sum((0, 2))[at])
            yardsticks.append(drawn.sum(2).sum(0)[at])
        self._scale = float(torch.cat(self._truths).square().sum(1).mean().sqrt()) or 1.0
        self._limit = TOLERANCE * max(self._error(yardsticks), FLOOR[dtype])
        self._outputs = GuardedOutputs((num_tokens, operation.hidden_size), dtype, spec.copies, operation.device)

    def _error(self, results: Sequence[torch.Tensor]) -> float:
        pairs = zip(results, self._truths, strict=True)
        return max(float((result.float() - truth).norm(dim=1).max()) for result, truth in pairs) / self._scale

    def bind(self, tactic: Tactic) -> Callable[[int], Tactic]:
        run = self._operation.bind(tactic, self._num_tokens, self._operation._arena)

        def call(i: int) -> Tactic:
            run(self.inputs[i], self._outputs.tensors[i])
            return tactic

        return call

    def check(self, run: Callable[[int], Tactic]) -> str | None:
        self._outputs.poison()
        for i in range(self.copies):
            run(i)
        if (fault := self._outputs.fault()) is not None:
            return fault
        error = self._error(self._outputs.tensors)
        return None if error <= self._limit else f"its error is {error:.3g} of the result, above {self._limit:.3g}"


class ServedAllReduce:
    """Serves a tuner's winners for one operation: the winner of `group_tokens`, else the default."""

    def __init__(self, operation: FinalizeAllReduce, tuner: Tuner) -> None:
        self.operation, self.tuner = operation, tuner
        self._epoch: Epoch | None = None
        self._index: dict[int, Runner] = {}
        self._default = operation.bind(GLOO, 0, None)

    def __call__(self, rows: torch.Tensor, *, group_tokens: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """rows: [T, K, H] contiguous; group_tokens: T, which the caller guarantees equal on all ranks. Returns [T, H].

        InputError: the tensors don't fit. TunerStateError: the group is dead, and every tactic talks to it. RankLost,
        CallsDiffer: a peer did not come, or came with another call; the group is then dead.
        """
        operation, tokens = self.operation, rows.shape[0]
        shape = (tokens, operation.hidden_size)
        if (
            rows.shape != (tokens, operation.slots, operation.hidden_size)
            or rows.dtype != operation.dtype
            or rows.is_cuda
            or not rows.is_contiguous()
        ):
            raise InputError(
                f"rows are {rows.dtype} {list(rows.shape)}; contiguous {operation.dtype} [tokens, {operation.slots}, {operation.hidden_size}] on the CPU are needed"
            )
        if tokens != group_tokens:
            raise InputError(f"rows hold {tokens} tokens and group_tokens is {group_tokens}; every rank reduces the same number")
        out = rows.new_empty(shape) if out is None else out
        if out.shape != shape or out.dtype != rows.dtype or not out.is_contiguous():
            raise InputError(f"out is {out.dtype} {list(out.shape)}; contiguous {rows.dtype} {list(shape)} is needed")
        group = self.tuner.group
        if group.dead:
            raise TunerStateError(
                f"this group is dead ({group.dead}), and every tactic of finalize + all-reduce talks to it; start a new group"
            )
        if not tokens:
            return out  # on every rank alike
        if self._epoch is not self.tuner.epoch:
            self._bind()
        try:
            self._index.get(tokens, self._default)(rows, out)
        except GroupError as error:
            group.dead = str(error)
            raise
        return out

    def lookup(self, num_tokens: int) -> Tactic:
        """The tactic that serves `num_tokens`."""
        winners = self.tuner.epoch.of(self.operation.problem, "eager")
        return next((winner.tactic for bucket, winner in winners.items() if bucket.low <= num_tokens <= bucket.high), GLOO)

    def _bind(self) -> None:
        epoch = self.tuner.epoch
        index: dict[int, Runner] = {}
        for bucket, winner in epoch.of(self.operation.problem, "eager").items():
            cell = Cell(self.operation.problem, "eager", bucket)
            if (reason := self.tuner.limits.why_not(self.operation, cell, winner.tactic)) is not None:  # peers will run it
                raise TunerStateError(f"this rank can't run the winner {winner.tactic} of {bucket} tokens: {reason}; tune again")
            index.update(
                dict.fromkeys(range(bucket.low, bucket.high + 1), self.operation.bind(winner.tactic, bucket.high, self.tuner.arena))
            )
        self._epoch, self._index = epoch, index


def _shape(out: torch.Tensor) -> str:
    return f"{list(out.shape)} {str(out.dtype).removeprefix('torch.')}"
