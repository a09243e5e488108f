"""Finalize + all-reduce over real processes: right sums, one tactic on all ranks whatever they measured, and no wait without an end.

The fault tests of collective tactics that need no sum are in `distributed/test_collective.py`.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.passes import make_tuner
from ranks import Rank, RankHangs, Ranks, run_ranks

from moe_dist import allreduce
from moe_dist.allreduce import GLOO, ONE_SHOT, TACTICS, TWO_SHOT, FinalizeAllReduce, Runner, ServedAllReduce
from moe_dist.distributed.symmetric import Arena, Refused, _total, reserve
from moe_dist.errors import CallsDiffer, ConfigError, GroupError, InputError, PassAborted, RankLost, TunerStateError, TuningError
from moe_dist.tuning.policy import STRATEGIES
from moe_dist.tuning.problem import Bucket, ProbeSpec, Tactic, Workspace
from moe_dist.tuning.tuner import Tuner

HIDDEN, SLOTS = 7, 3
MIB = 1 << 20
SMALL, LARGE = Bucket(1, 1), Bucket(2, 4)  # the ladder of `make_tuner`
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Slowed(FinalizeAllReduce):
    """delays_ms: what a call of a tactic takes longer on this rank, so that a test decides who wins.

    faults: called with the number of the run before each run of a tactic. greed: bytes more of workspace for the larger bucket.
    """

    def __init__(
        self, rank: Rank, delays_ms: Mapping[Tactic, float] | None = None, *, patience_s: float = 20.0, dtype: str = "fp32"
    ) -> None:
        store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
        super().__init__(hidden_size=HIDDEN, slots=SLOTS, dtype=dtype, group=dist.group.WORLD, patience=timedelta(seconds=patience_s))
        self.delays_ms = delays_ms or {}
        self.faults: dict[Tactic, Callable[[int], None]] = {}
        self.greed = 0

    def workspace(self, tactic: Tactic, num_tokens: int) -> Workspace:
        real = super().workspace(tactic, num_tokens)
        return Workspace(real.nbytes + (self.greed if num_tokens > 1 else 0), symmetric=True) if real.symmetric else real

    def bind(self, tactic: Tactic, num_tokens: int, arena: Arena | Refused | None) -> Runner:
        inner, runs = super().bind(tactic, num_tokens, arena), 0

        def run(rows: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal runs
            runs += 1
            if tactic in self.faults:
                self.faults[tactic](runs)
            time.sleep(self.delays_ms.get(tactic, 0.0) / 1000)
            inner(rows, out)

        return run


def fastest(tactic: Tactic) -> dict[Tactic, float]:
    """Delays that make it win: even on a loaded machine a call takes less."""
    return {other: 20.0 for other in TACTICS if other != tactic}


def rows_of(rank: int, tokens: int, call: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(call * 1000 + tokens * 10 + rank)
    return torch.randn(tokens, SLOTS, HIDDEN, generator=generator).to(dtype)


def truth(size: int, tokens: int, call: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([rows_of(rank, tokens, call, dtype).float().sum(1) for rank in range(size)]).sum(0)


def poisoned(tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((tokens, HIDDEN), torch.nan, dtype=dtype)


def serve_right(rank: Rank, served: ServedAllReduce, tokens: int, call: int = 0) -> bool:
    out = served(rows_of(rank.index, tokens, call), group_tokens=tokens, out=poisoned(tokens))
    return torch.allclose(out, truth(rank.size, tokens, call), rtol=1e-5, atol=1e-5)


# -- the sums ----------------------------------------------------------------------------------------------------------------

# Fewer elements than 4 ranks have equal parts of (1 x 7), ragged last parts (3, 5), an even split over 4 (8), and small after
# large, so that what a larger call left in the arena would show.
COUNTS = (1, 3, 8, 5, 1)


def reduce_all(rank: Rank, dtype: str) -> Any:
    """Every result by tactic, on poisoned outputs."""
    operation = Slowed(rank, dtype=dtype)
    group = rank.group()
    group.begin_pass()
    arena = reserve(group, "test", operation.workspace(ONE_SHOT, max(COUNTS)).nbytes)
    results = {}
    for tactic in TACTICS:
        run = operation.bind(tactic, max(COUNTS), arena)
        for call, tokens in enumerate(COUNTS):
            out = poisoned(tokens, operation.dtype)
            run(rows_of(rank.index, tokens, call, operation.dtype), out)
            results[tactic, call] = out.float().numpy()
    return results


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_holds_the_sum_over_slots_and_ranks(size: int, dtype: str, tmp_path: Path) -> None:
    outcomes = run_ranks(reduce_all, size, tmp_path, dtype)
    assert [outcome.error for outcome in outcomes] == [""] * size, outcomes
    for call, tokens in enumerate(COUNTS):
        expected = truth(size, tokens, call, DTYPES[dtype])
        plain = torch.stack([rows_of(rank, tokens, call, DTYPES[dtype]).sum(1) for rank in range(size)]).sum(0).float()
        limit = 2 * max(float((plain - expected).norm()), torch.finfo(DTYPES[dtype]).eps * float(expected.norm()))
        for tactic in TACTICS:
            results = [torch.from_numpy(outcome.value[tactic, call]) for outcome in outcomes]
            assert all(float((result - expected).norm()) <= limit for result in results), (tactic, tokens, results, expected)
            assert all(torch.equal(result, results[0]) for result in results), f"{tactic}: ranks hold different bits"


def in_threads(call: Callable[[Arena, torch.Tensor], Any], *rows: torch.Tensor) -> list[Any]:
    """`call(arena, rows)` of each rank, in one process."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, _total(len(rows), 4096))
    arenas = [Arena(fd, rank, range(len(rows)), 4096) for rank in range(len(rows))]
    os.close(fd)

    def caught(arena: Arena, mine: torch.Tensor) -> Any:
        try:
            return call(arena, mine)
        except GroupError as error:
            return error

    with ThreadPoolExecutor(len(rows)) as threads:
        return [future.result(60) for future in [threads.submit(caught, *pair) for pair in zip(arenas, rows, strict=True)]]


def test_the_worked_example() -> None:
    def two_shot(arena: Arena, rows: torch.Tensor) -> Any:
        out = torch.full((1, 3), torch.nan)
        allreduce._two_shot(arena, 20.0, rows, out)
        # After the call a rank's data still holds its sums in its own part, and what it brought in the other.
        return out.tolist(), arena.data(arena.rank, torch.float32, 3).tolist()

    done = in_threads(two_shot, torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[10.0, 20.0, 30.0]]]))
    assert done == [([[11.0, 22.0, 33.0]], [11.0, 22.0, 3.0]), ([[11.0, 22.0, 33.0]], [10.0, 20.0, 33.0])]


@pytest.mark.parametrize("runs", [(allreduce._one_shot, allreduce._two_shot), (allreduce._two_shot, allreduce._two_shot)])
def test_ranks_in_different_calls_are_told_instead_of_summing(runs: Any) -> None:
    # Two algorithms, or two token counts of one.
    def call(arena: Arena, rows: torch.Tensor) -> None:
        tokens = 4 + arena.rank if runs[0] is runs[1] else 4
        runs[arena.rank](arena, 20.0, rows[:tokens], poisoned(tokens))

    raised = in_threads(call, rows_of(0, 5), rows_of(1, 5))
    assert [(type(error), error.ranks) for error in raised] == [(CallsDiffer, (1,))] * 2, raised


def test_the_probe_rejects_what_sums_wrongly() -> None:
    operation = FinalizeAllReduce(hidden_size=HIDDEN, slots=SLOTS, dtype="bf16")
    probe = operation.probe(70, ProbeSpec(copies=2))  # more rows than are drawn
    assert probe.check(probe.bind(GLOO)) is None

    def half(i: int) -> Tactic:
        torch.sum(probe.inputs[i][:35], 1, out=probe._outputs.tensors[i][:35])
        return GLOO

    def one_slot_less(i: int) -> Tactic:
        torch.sum(probe.inputs[i][:, 1:], 1, out=probe._outputs.tensors[i])
        return GLOO

    assert probe.check(half) == "35 of 70 rows of input set 0 were not written or are NaN, row 35 first"
    assert "of the result, above" in str(probe.check(one_slot_less))


def test_workspace_depends_on_the_tactic() -> None:
    operation = FinalizeAllReduce(hidden_size=HIDDEN, slots=SLOTS, dtype="bf16")
    operation.size = 4
    assert [operation.workspace(tactic, 5) for tactic in TACTICS] == [
        Workspace(),
        Workspace(4 * 5 * 7 * 2, symmetric=True),
        Workspace(5 * 7 * 2, symmetric=True),
    ]


@pytest.mark.parametrize("wrong", [{"hidden_size": 0}, {"slots": 0}, {"dtype": "fp8"}])
def test_sizes_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size .* and slots .* must be at least 1, dtype .* one of"):
        FinalizeAllReduce(**{"hidden_size": 4, "slots": 2} | wrong)


def test_calls_that_do_not_fit_are_refused_before_a_peer_is_met() -> None:
    with Tuner(device="cpu") as tuner:
        served = ServedAllReduce(FinalizeAllReduce(hidden_size=HIDDEN, slots=SLOTS, dtype="fp32"), tuner)
        assert served(rows_of(0, 0), group_tokens=0).shape == (0, HIDDEN)
        torch.testing.assert_close(served(rows_of(0, 2), group_tokens=2), truth(1, 2))
        with pytest.raises(InputError, match="rows hold 2 tokens and group_tokens is 3; every rank reduces the same number"):
            served(rows_of(0, 2), group_tokens=3)
        with pytest.raises(
            InputError, match=r"rows are torch.float32 \[2, 2, 7\]; contiguous torch.float32 \[tokens, 3, 7\] on the CPU are needed"
        ):
            served(rows_of(0, 2)[:, :2], group_tokens=2)
        with pytest.raises(InputError, match=r"out is torch.float32 \[1, 7\]; contiguous torch.float32 \[2, 7\] is needed"):
            served(rows_of(0, 2), group_tokens=2, out=poisoned(1))
        tuner.group.dead = "rank 1 lost"
        with pytest.raises(
            TunerStateError, match=r"this group is dead \(rank 1 lost\), and every tactic .* talks to it; start a new group"
        ):
            served(rows_of(0, 2), group_tokens=2)


# -- agreeing ----------------------------------------------------------------------------------------------------------------

# By its own clock rank 0 would take gloo and rank 1 one_shot.
DISAGREEING = ({ONE_SHOT: 20.0, TWO_SHOT: 20.0}, {GLOO: 20.0, TWO_SHOT: 20.0})


def tunes_apart(rank: Rank) -> None:
    """What ranks do without a protocol: each serves what its own clock prefers, with kernels that wait without a bound."""
    operation = Slowed(rank, patience_s=3600.0)
    group = rank.group()
    group.begin_pass()
    arena = reserve(group, "test", operation.workspace(ONE_SHOT, 4).nbytes)
    mine = min(TACTICS, key=lambda tactic: DISAGREEING[rank.index].get(tactic, 0.0))
    rank.mark(f"{rank.index}-calls-{mine.backend}")
    operation.bind(mine, 4, arena)(rows_of(rank.index, 4), poisoned(4))


def test_without_agreement_a_divergence_is_a_hang(tmp_path: Path) -> None:
    with Ranks(tunes_apart, 2, tmp_path) as ranks:
        ranks.wait("0-calls-gloo")
        ranks.wait("1-calls-shared_memory")
        for rank in range(2):
            with pytest.raises(RankHangs, match=f"rank {rank} still runs at its deadline"):
                ranks.join_one(rank, 2.0)


def tune_and_serve(rank: Rank, strategy: str, delays: tuple[dict[Tactic, float], ...], limit: int | None = None) -> Any:
    """(digest, tactic of each bucket, all sums right, what was rejected)."""
    operation = Slowed(rank, delays[rank.index % len(delays)])
    with make_tuner(rank, strategy, progress_timeout=30.0, workspace_limit=limit) as tuner:
        tuner.record(operation)
        report = tuner.run_pass()
        served = ServedAllReduce(operation, tuner)
        # 6 tokens are beyond the ladder: the default. 0 tokens, then a normal call.
        right = [serve_right(rank, served, tokens, call) for call, tokens in enumerate((1, 4, 0, 2, 6, 3))]
        tactics = [str(served.lookup(bucket.high)) for bucket in (SMALL, LARGE)]
        return report.digest, tactics, right, sorted({(str(cell.bucket), str(tactic), why) for cell, tactic, why in report.rejected})


@pytest.mark.parametrize(("strategy", "size"), [("reduce", 4), ("shard", 2), ("reload", 2)])
def test_with_agreement_ranks_that_time_differently_serve_one_tactic(strategy: str, size: int, tmp_path: Path) -> None:
    outcomes = run_ranks(tune_and_serve, size, tmp_path, strategy, DISAGREEING, deadline=120)
    assert [outcome.error for outcome in outcomes] == [""] * size, outcomes
    assert all(outcome.value == outcomes[0].value for outcome in outcomes), outcomes
    assert outcomes[0].value[2] == [True] * 6


@each_strategy
def test_the_workspace_limit_leaves_one_shot_out(strategy: str, tmp_path: Path) -> None:
    # 4 tokens of 7 floats are 112 bytes: two_shot fits in 200, one_shot over 2 ranks does not; at 1 token both do.
    outcomes = run_ranks(tune_and_serve, 2, tmp_path, strategy, (fastest(ONE_SHOT),), 200, deadline=120)
    assert [outcome.error for outcome in outcomes] == [""] * 2, outcomes
    _, (small, large), right, rejected = outcomes[0].value
    assert outcomes[1].value == outcomes[0].value
    assert small == str(ONE_SHOT)
    assert large in (str(GLOO), str(TWO_SHOT))
    assert ("2-4", str(ONE_SHOT), "rank 0: needs 224 bytes of workspace; the limit is 200") in rejected
    assert right == [True] * 6


def counts_steps(rank: Rank, strategy: str, who: int | None) -> Any:
    """The steps of a pass in which rank `who` has no room for the memory of measuring."""
    operation = Slowed(rank)
    operation.greed = 48 * MIB
    if rank.index == who:
        limit_memory(leader=who == 0)
    with make_tuner(rank, strategy, progress_timeout=30.0) as tuner:
        steps: list[str] = []
        exchange = tuner.group.exchange

        def counted(step: str, word: bytes, **which: Any) -> list[bytes]:
            steps.append(step)
            return exchange(step, word, **which)

        tuner.group.exchange = counted  # type: ignore[method-assign]
        tuner.record(operation)
        tuner.run_pass([LARGE])
        return steps


@each_strategy
def test_the_steps_of_a_pass_follow_from_its_plan_alone(strategy: str, tmp_path: Path) -> None:
    outcomes = [outcome for who in (None, 1) for outcome in run_ranks(counts_steps, 2, tmp_path / str(who), strategy, who)]
    assert [outcome.error for outcome in outcomes] == [""] * 4, outcomes
    taken = [outcome.value for outcome in outcomes]
    assert all(steps == taken[0] for steps in taken), taken
    assert [step for step in taken[0] if step.startswith(("lend", "reserve"))] == [
        f"{step}-{word}" for step in ("lend", "reserve") for word in ("bytes", "made", "mapped")
    ]


def raises_once(rank: Rank, strategy: str) -> Any:
    operation = Slowed(rank, fastest(ONE_SHOT), patience_s=1.0)

    def fault(run: int) -> None:
        if rank.index == 1 and run == 3:
            raise RuntimeError("the device reports an error flag")

    operation.faults[ONE_SHOT] = fault
    with make_tuner(rank, strategy, progress_timeout=30.0) as tuner:
        tuner.record(operation)
        report = tuner.run_pass([LARGE])
        served = ServedAllReduce(operation, tuner)
        return (
            report.digest,
            str(served.lookup(4)),
            [(str(tactic), why) for _, tactic, why in report.rejected],
            serve_right(rank, served, 4),
        )


@each_strategy
def test_a_fault_in_one_tactic_takes_no_other_with_it(strategy: str, tmp_path: Path) -> None:
    outcomes = run_ranks(raises_once, 2, tmp_path, strategy, deadline=120)
    assert [outcome.error for outcome in outcomes] == [""] * 2, outcomes
    assert outcomes[1].value == outcomes[0].value
    _, winner, rejected, right = outcomes[0].value
    assert winner in (str(GLOO), str(TWO_SHOT)), "two_shot is timed after one_shot, in the same memory"
    assert [tactic for tactic, _ in rejected] == [str(ONE_SHOT)]
    assert "rank 1 lost in one_shot of [4, 7] float32: not there after 1 s" in rejected[0][1]
    assert right


# -- faults ------------------------------------------------------------------------------------------------------------------


def ends_in_a_call(rank: Rank, tactic: Tactic) -> Any:
    """Rank 1 stays in the middle of a call, between what it wrote and what it says of it."""
    operation = Slowed(rank, fastest(tactic), patience_s=3.0)
    with make_tuner(rank, "reduce", progress_timeout=30.0) as tuner:
        tuner.record(operation)
        tuner.run_pass([LARGE])
        served = ServedAllReduce(operation, tuner)
        assert served.lookup(4) == tactic
        assert serve_right(rank, served, 4)
        if rank.index == 1:
            assert tuner.arena is not None

            def stay(what: str) -> None:
                rank.mark("inside")
                time.sleep(3600)

            tuner.arena.post = stay  # type: ignore[method-assign]
        errors = []
        for _ in range(2):
            try:
                served(rows_of(rank.index, 4), group_tokens=4)
            except TuningError as error:
                errors.append(error)
        lost, dead = errors
        assert isinstance(lost, RankLost)
        return str(lost), lost.ranks, str(dead)


@pytest.mark.parametrize(("tactic", "fault"), [(ONE_SHOT, signal.SIGKILL), (TWO_SHOT, signal.SIGKILL), (TWO_SHOT, signal.SIGSTOP)])
def test_a_rank_that_ends_in_the_middle_of_a_call_is_named_by_all(tactic: Tactic, fault: signal.Signals, tmp_path: Path) -> None:
    with Ranks(ends_in_a_call, 3, tmp_path, tactic) as ranks:
        ranks.wait("inside")
        ranks.signal(1, fault)
        survivors = [ranks.join_one(rank, 30.0) for rank in (0, 2)]
    for outcome in survivors:
        assert not outcome.error, outcome
        lost, culprits, dead = outcome.value
        assert culprits == (1,)
        assert lost.startswith(f"rank 1 lost in {tactic['algorithm']} of [4, 7] float32: ")
        assert dead.startswith(f"this group is dead ({lost}), ")


def ends_while_measuring(rank: Rank, strategy: str, tactic: Tactic) -> Any:
    operation = Slowed(rank, patience_s=1.0)

    def stay(run: int) -> None:
        if rank.index == 1 and run == 3:
            rank.mark("inside")
            time.sleep(3600)

    operation.faults[tactic] = stay
    with make_tuner(rank, strategy, progress_timeout=4.0) as tuner:
        tuner.record(operation)
        tuner.run_pass([LARGE])


@pytest.mark.parametrize(("strategy", "tactic"), [("reduce", GLOO), ("shard", ONE_SHOT), ("reload", TWO_SHOT)])
def test_a_rank_that_is_killed_while_a_collective_is_timed_is_named_by_all(strategy: str, tactic: Tactic, tmp_path: Path) -> None:
    with Ranks(ends_while_measuring, 3, tmp_path, strategy, tactic) as ranks:
        ranks.wait("inside")
        ranks.kill(1)
        survivors = [ranks.join_one(rank, 30.0) for rank in (0, 2)]
    assert [(outcome.error, outcome.culprits) for outcome in survivors] == [("RankLost", (1,))] * 2, survivors
    assert survivors[0].message == survivors[1].message


def limit_memory(leader: bool) -> int:
    """Leave this process no room for 48 MiB of symmetric memory: in a file, which the leader makes, or in its addresses. Gives the kind of limit."""
    kind = resource.RLIMIT_FSIZE if leader else resource.RLIMIT_AS
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(kind, (MIB if leader else pages * resource.getpagesize() + 40 * MIB, resource.RLIM_INFINITY))
    return kind


def cannot_lend(rank: Rank) -> Any:
    operation = Slowed(rank, fastest(ONE_SHOT))
    operation.greed = 48 * MIB
    if rank.index == 1:
        limit_memory(leader=False)
    with make_tuner(rank, "reduce", progress_timeout=30.0) as tuner:
        tuner.record(operation)
        report = tuner.run_pass([LARGE])
        served = ServedAllReduce(operation, tuner)
        return str(served.lookup(4)), [(str(tactic), why) for _, tactic, why in report.rejected], serve_right(rank, served, 4)


def test_memory_for_measuring_that_one_rank_cannot_have_leaves_out_what_needs_it(tmp_path: Path) -> None:
    outcomes = run_ranks(cannot_lend, 2, tmp_path)
    assert [outcome.error for outcome in outcomes] == [""] * 2, outcomes
    assert outcomes[1].value == outcomes[0].value
    winner, rejected, right = outcomes[0].value
    assert winner == str(GLOO)
    assert [tactic for tactic, _ in rejected] == [str(ONE_SHOT), str(TWO_SHOT)]
    assert all("bytes of symmetric memory a rank could not be reserved: rank 1: " in why for _, why in rejected)
    assert right


def reloads(rank: Rank, strategy: str) -> Any:
    operation = Slowed(rank)
    with make_tuner(rank, strategy, progress_timeout=30.0) as tuner:
        served = ServedAllReduce(operation, tuner)
        unrecorded = tuner.reload()
        with pytest.raises(
            TunerStateError, match="has no symmetric memory for its 56 bytes: record the operation before the pass or reload"
        ):
            served(rows_of(rank.index, 4), group_tokens=4)
        tuner.record(operation)
        return unrecorded, tuner.reload(), str(served.lookup(4)), [serve_right(rank, served, tokens) for tokens in (1, 4)]


def test_a_reloaded_epoch_gets_its_memory(tmp_path: Path) -> None:
    first = run_ranks(tune_and_serve, 2, tmp_path, "reduce", (fastest(ONE_SHOT),))
    assert first[0].value[1] == [str(ONE_SHOT)] * 2, first
    outcomes = run_ranks(reloads, 2, tmp_path, "reduce")
    assert [outcome.value for outcome in outcomes] == [(True, True, str(ONE_SHOT), [True, True])] * 2, outcomes


def cannot_reserve(rank: Rank, strategy: str, who: int) -> Any:
    """The larger bucket's winner is a hit that needs 48 MiB a rank, which rank `who` may not have."""
    operation = Slowed(rank, fastest(ONE_SHOT))
    operation.greed = 48 * MIB
    with make_tuner(rank, strategy, progress_timeout=30.0) as tuner:
        tuner.record(operation)
        served = ServedAllReduce(operation, tuner)
        tuner.run_pass([SMALL])
        before, arena = tuner.epoch, tuner.arena
        limited = limit_memory(leader=who == 0) if rank.index == who else resource.RLIMIT_AS
        message, culprits = "", ()
        try:
            tuner.run_pass([LARGE])
        except PassAborted as error:
            message, culprits = str(error), error.ranks
        kept = tuner.epoch is before and tuner.arena is arena and served.lookup(4) == GLOO and served.lookup(1) == ONE_SHOT
        right = [serve_right(rank, served, tokens) for tokens in (1, 4)]
        resource.setrlimit(limited, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        tuner.run_pass([LARGE])
        right += [serve_right(rank, served, tokens) for tokens in (1, 4)]
        arena = tuner.arena
        tuner.run_pass([SMALL])  # needs less than there is
        return message, culprits, kept, right, str(served.lookup(4)), tuner.arena is arena


# The leader can't make the file, or another rank can't map it.
@pytest.mark.parametrize(("strategy", "who", "why"), [("reduce", 0, "File too large"), ("shard", 1, "memory"), ("reload", 1, "memory")])
def test_memory_that_one_rank_cannot_have_aborts_the_pass_everywhere(strategy: str, who: int, why: str, tmp_path: Path) -> None:
    first = run_ranks(greedy, 2, tmp_path, strategy)
    assert [outcome.value for outcome in first] == [str(ONE_SHOT)] * 2, first
    outcomes = run_ranks(cannot_reserve, 2, tmp_path, strategy, who)
    assert [outcome.error for outcome in outcomes] == [""] * 2, outcomes
    assert outcomes[1].value == outcomes[0].value
    message, culprits, kept, right, healed, same_memory = outcomes[0].value
    needed = 48 * MIB + 2 * 4 * 7 * 4
    assert message.startswith(f"{needed} bytes of symmetric memory a rank could not be reserved: rank {who}: ")
    assert why in message
    assert culprits == (who,)
    assert kept, "the previous epoch is intact"
    assert right == [True] * 4
    assert healed == str(ONE_SHOT)
    assert same_memory, "a captured graph may hold its addresses"


def greedy(rank: Rank, strategy: str) -> Any:
    operation = Slowed(rank, fastest(ONE_SHOT))
    operation.greed = 48 * MIB
    with make_tuner(rank, strategy, progress_timeout=30.0) as tuner:
        tuner.record(operation)
        tuner.run_pass()
        return str(ServedAllReduce(operation, tuner).lookup(4))
