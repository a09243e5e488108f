"""What ranks that tune apart say: their winners' places, and an entry only where the leader has none that serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgpack
import pytest
from fakes import FakeOperation, tactic
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed.group import RankGroup
from moe_dist.stores.codec import decode_entry, encode_entry
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning.pass_terms import BUDGET_ENDED
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, Entry
from moe_dist.tuning.tuner import PassReport, Tuner

COSTS = {"plain": 150_000.0, "quick": 100.0}  # us; far enough apart for a busy machine


def tune_apart(
    *operations: list[FakeOperation], store: MemoryStore | None = None, meanwhile: Mapping[str, bytes] | None = None, budget_s: float = 0.0
) -> tuple[list[PassReport], list[dict[str, bytes]]]:
    """One rank for each list of operations, all over one store: their reports, and each one's word of each step of tuning apart.

    meanwhile: what another job has stored by the time that the leader lists the table.
    """
    store, rendezvous = MemoryStore() if store is None else store, HashStore()
    said: list[dict[str, bytes]] = [{} for _ in operations]
    deadlines = {"progress_timeout": timedelta(seconds=20), "cap": timedelta(seconds=60)}

    def tune(rank: int) -> PassReport:
        group = RankGroup(rendezvous, rank, len(operations), **deadlines)
        for name in ("reduce", "exchange"):
            speak = getattr(group, name)

            def speaking(step: str, word: bytes, *rest: Any, speak: Any = speak, **reads: Any) -> Any:
                if step.startswith("reload-"):
                    said[rank][step] = word
                if step == "reload-published":
                    for key, value in (meanwhile or {}).items():
                        store.put(key, value)
                return speak(step, word, *rest, **reads)

            setattr(group, name, speaking)
        policy = MeasurementPolicy(rounds=1, sweeps=1)
        budget = timedelta(seconds=budget_s) if budget_s else None
        settings: dict[str, Any] = {"policy": policy, "ladder": BucketLadder((4,)), "device": "cpu", "budget": budget}
        with Tuner(store=store, group=group, strategy="reload", **settings) as tuner:
            for operation in operations[rank]:
                tuner.record(operation)
            return tuner.run_pass()

    with ThreadPoolExecutor(len(operations)) as pool:
        reports = [ended.result(60) for ended in [pool.submit(tune, rank) for rank in range(len(operations))]]
    assert len({report.digest for report in reports}) == 1
    return reports, said


def winners(report: PassReport) -> dict[str, str]:
    return {str(dict(row.cell.problem.fields)["name"]): row.winner.tactic["name"] if row.winner else "" for row in report.rows}


def test_where_the_leader_has_a_winner_no_entry_is_sent() -> None:
    reports, said = tune_apart(*[[FakeOperation("a", COSTS), FakeOperation("b", COSTS)]] * 3)
    assert [winners(report) for report in reports] == [{"a": "quick", "b": "quick"}] * 3
    for words in said:
        assert list(words) == ["reload-published"]
        won, failed = msgpack.unpackb(words["reload-published"], strict_map_key=False)
        assert (won, failed) == ({0: 1, 1: 1}, {0: [], 1: []}), "the winner is the second of the plan's tactics"


def test_what_the_leader_lacks_is_sent_by_the_first_rank_that_has_it() -> None:
    both = [FakeOperation("a", COSTS), FakeOperation("b", COSTS)]
    reports, said = tune_apart(both[:1], both, both)
    assert [winners(report) for report in reports] == [{"a": "quick", "b": "quick"}] * 3
    sent = [msgpack.unpackb(words["reload-entries"], strict_map_key=False) for words in said]
    assert [list(entries) for entries in sent] == [[], [1], []]
    assert decode_entry(sent[1][1]).tactic["name"] == "quick"


def test_a_winner_that_failed_elsewhere_is_passed_over_for_the_next_rank_s() -> None:
    """Rank 0's winner runs out of memory on rank 1, which has another."""
    reports, said = tune_apart([FakeOperation("a", COSTS)], [FakeOperation("a", {**COSTS, "quick": "oom"})])
    assert [winners(report) for report in reports] == [{"a": "plain"}] * 2
    assert [list(msgpack.unpackb(words["reload-entries"], strict_map_key=False)) for words in said] == [[], [0]]


def test_all_ranks_say_the_same_of_a_cell_without_a_winner_though_the_budget_ended_on_one() -> None:
    """Rank 2 has no time left after a: c, which it alone has, nobody measures. Of b the winner of either other rank fails on the other."""
    a, b, c = sorted("abc", key=lambda name: FakeOperation(name, {}).problem.packed)  # in the order of a plan
    first, second = {"plain": 3000.0, "x": 100.0, "y": "oom"}, {"plain": 3000.0, "x": "oom", "y": 100.0}
    late = [FakeOperation(a, {"plain": 1_500_000.0}), FakeOperation(b, first), FakeOperation(c, first)]
    reports, _ = tune_apart([FakeOperation(b, first)], [FakeOperation(b, second)], late, budget_s=1.0)
    untimed = [{dict(row.cell.problem.fields)["name"]: row.untimed for row in report.rows} for report in reports]
    assert untimed == [{a: None, b: "no candidate won that ran on all ranks", c: BUDGET_ENDED}] * 3
    assert len({report.rejected for report in reports}) == 1


def with_tactic(name: str) -> Callable[[Entry], Entry]:
    return lambda entry: dataclasses.replace(entry, tactic=tactic(name))


# What lies in the store where the leader lists the table, and what is served then, of "quick" and the slow "plain". The first is taken:
# another job's winner. The others are none of this key, of this plan, or of those that ran on all ranks.
@pytest.mark.parametrize(
    ("changed", "quick", "served"),
    [
        pytest.param(with_tactic("plain"), 100.0, "plain", id="another job's winner"),
        pytest.param(lambda entry: dataclasses.replace(with_tactic("plain")(entry), key=b"another"), 100.0, "quick", id="another key's"),
        pytest.param(with_tactic("gone"), 100.0, "quick", id="not in the plan"),
        pytest.param(with_tactic("quick"), "oom", "plain", id="failed on a rank"),
    ],
)
def test_of_what_the_store_holds_by_then_only_what_all_can_serve_is_taken(
    changed: Callable[[Entry], Entry], quick: Any, served: str
) -> None:
    costs, store = {"plain": 3000.0, "quick": 100.0}, MemoryStore()
    tune_apart([FakeOperation("a", costs)], store=store)
    ((path, value),) = store.get_many(store.list("entries")).items()
    planted = {path: encode_entry(changed(decode_entry(value)))}
    reports, _ = tune_apart([FakeOperation("a", costs)], [FakeOperation("a", {**costs, "quick": quick})], meanwhile=planted)
    assert [winners(report) for report in reports] == [{"a": served}] * 2
