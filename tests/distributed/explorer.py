"""Runs the real pass of several ranks in one process, one request to the rendezvous at a time, in whatever order it is told.

Each rank is a thread that holds the baton only between two requests; the rendezvous, the clock and the timing of candidates
are simulated, everything else is the code that serves. A rank's clock moves only while it waits, so a rank that is not
chosen for long is lost to its peers, and wakes later: slow, stopped and late ranks are orders of requests. A crash ends a
rank between two requests. Too slow to follow every order: `pass_model.py` does that, over a model; here orders are random.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeOperation

from moe_dist.distributed import rendezvous as rendezvous_module
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.words import Verdict
from moe_dist.errors import GroupError
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning import pass_terms, rounds, tuner
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, Measurement, Tactic, Timed
from moe_dist.versions import code_version

LOOK_S = 0.26  # a wait looks around every time it wakes: more than the group's own interval
PROGRESS_TIMEOUT_S, CAP_S = 0.3, 3.0  # lost at the second look without progress; in all, eleven looks a pass
MAX_STEPS = 4_000
POLICY = MeasurementPolicy(rounds=1, sweeps=1)
SETTINGS: dict[str, Any] = {"policy": POLICY, "ladder": BucketLadder((1,)), "device": "cpu", "deployment": "explored"}
ENVIRONMENT = build_environment(torch.device("cpu"))

Action = tuple[str, int]  # ("run" or "crash", rank)


class Crash(BaseException):
    """Ends a rank's thread between two requests; nothing that it does afterwards reaches the rendezvous."""


class Violation(AssertionError):
    """An invariant does not hold; the message ends with the order of requests that shows it."""


@dataclasses.dataclass
class Scenario:
    """passes: how many a rank runs; those in `closes` run one less, and close. raises: ranks that leave by an exception while they measure. allowed: how a rank may end
    besides serving the table of all passes. entries: what the stores of the holders (None: of all) hold, see `stored`."""

    size: int = 2
    passes: int = 1
    raises: tuple[int, ...] = ()
    closes: tuple[int, ...] = ()
    allowed: tuple[str, ...] = ("RankLost",)
    entries: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    holders: tuple[int, ...] | None = None


def stored(passes: int = 1) -> dict[str, bytes]:
    """The entries of all problems: a pass over them hits, and so has fewer steps."""
    store = MemoryStore()
    with tuner.Tuner(store=store, **SETTINGS) as before:
        for number in range(passes):
            before.record(FakeOperation(f"operation-{number}", {"plain": 20.0, "quick": 10.0}))
        before.run_pass()
    return {key: store.get(key) or b"" for key in store.list("entries")}


@dataclasses.dataclass
class RankState:
    index: int
    clock_s: float = 0.0
    started_s: float = 0.0
    done: bool = False
    crashed: bool = False
    error: BaseException | None = None
    tables: list[str] = dataclasses.field(default_factory=list)  # what it served before the first pass and after each
    tried: int = 0  # passes begun
    go: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class World:
    """One execution. `step(action)` moves one rank by one request; `finish` lets go of the threads."""

    def __init__(self, scenario: Scenario, *, scope: str = "run-0", values: dict[str, bytes] | None = None) -> None:
        self.scenario, self.scope = scenario, scope
        self.values: dict[str, bytes] = {} if values is None else values
        self.ranks = [RankState(index) for index in range(scenario.size)]
        self.path: list[Action] = []
        self._back = threading.Lock()
        self._back.acquire()
        self._here = threading.local()
        self._threads = [threading.Thread(target=self._body, args=(rank,), daemon=True) for rank in self.ranks]

    # -- the schedule ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for rank, thread in zip(self.ranks, self._threads, strict=True):
            rank.go.acquire()
            thread.start()
        for rank in self.ranks:
            self._hand_over(rank)  # to the first request of each

    def actions(self, crashes: int) -> list[Action]:
        alive = [rank.index for rank in self.ranks if not rank.done]
        spent = sum(rank.crashed for rank in self.ranks)
        return [("run", index) for index in alive] + ([("crash", index) for index in alive] if spent < crashes and len(alive) > 1 else [])

    def step(self, action: Action) -> None:
        kind, index = action
        self.path.append(action)
        rank = self.ranks[index]
        rank.crashed = rank.crashed or kind == "crash"
        self._hand_over(rank)
        # At the cap one rank watches: another takes its place a look later, as often as there are ranks.
        if rank.clock_s - rank.started_s > CAP_S + (2 + len(self.ranks)) * LOOK_S:
            self.fail(f"rank {index} waited {rank.clock_s - rank.started_s:.2f} s; the cap is {CAP_S} s")
        if len(self.path) > MAX_STEPS:
            self.fail(f"no end after {MAX_STEPS} requests")

    def finish(self) -> None:
        for rank in self.ranks:
            rank.crashed = rank.crashed or not rank.done
        for rank in self.ranks:
            while not rank.done:
                self._hand_over(rank)
        for thread in self._threads:
            thread.join(10)

    def fail(self, why: str) -> None:
        raise Violation(f"{why}; order: {' '.join(f'{kind[0]}{index}' for kind, index in self.path)}")

    def _hand_over(self, rank: RankState) -> None:
        rank.go.release()
        self._back.acquire()

    # -- what a rank's thread sees -----------------------------------------------------------------------------------------

    @property
    def here(self) -> RankState:
        rank: RankState = self._here.rank
        return rank

    def point(self) -> None:
        """Give the baton back before a request that others can notice."""
        rank = self.here
        self._back.release()
        rank.go.acquire()
        self.alive()

    def alive(self) -> None:
        if self.here.crashed:
            raise Crash

    def _body(self, rank: RankState) -> None:
        self._here.rank = rank
        rank.go.acquire()
        try:
            if not rank.crashed:
                self._run(rank)
        except Crash:
            pass
        except BaseException as error:
            rank.error = error
        rank.done = True
        self._back.release()

    def _run(self, rank: RankState) -> None:
        scenario = self.scenario
        deadlines = {"progress_timeout": timedelta(seconds=PROGRESS_TIMEOUT_S), "cap": timedelta(seconds=CAP_S)}
        group = RankGroup(Rendezvous(self), rank.index, scenario.size, scope=self.scope, **deadlines)  # type: ignore[arg-type]
        store = MemoryStore()
        if scenario.holders is None or rank.index in scenario.holders:
            for key, value in scenario.entries.items():
                store.put(key, value)
        with tuner.Tuner(store=store, group=group, **SETTINGS) as tuned:
            rank.tables.append(tuned.epoch.digest)
            try:
                for number in range(scenario.passes - (rank.index in scenario.closes)):
                    operation = FakeOperation(f"operation-{number}", {"plain": 20.0, "quick": 10.0 + rank.index})
                    operation.probe_fault = "raise" if rank.index in scenario.raises else ""
                    tuned.record(operation)
                    rank.tried += 1
                    rank.started_s = rank.clock_s
                    tuned.run_pass()
                    rank.tables.append(tuned.epoch.digest)
            except BaseException:
                rank.tables.append(tuned.epoch.digest)
                raise


class Rendezvous:
    """A torch.distributed Store over the world's dict. A read of what is not there would block for ever: a violation."""

    def __init__(self, world: World) -> None:
        self._world, self._values = world, world.values

    def clone(self) -> Rendezvous:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        # Progress is seen or not by when its reader comes; its writing needs no order of its own.
        self._world.alive() if "/progress/" in key or "/version/" in key else self._world.point()
        self._values[key] = value.encode() if isinstance(value, str) else value

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def get(self, key: str) -> bytes:
        self._world.alive()
        if key not in self._values:
            self._world.fail(f"rank {self._world.here.index} reads {key}, which is not there")
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._world.alive() if "/progress/" in keys[0] or "/version/" in keys[0] else self._world.point()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._world.alive()
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._world.alive() if "/claim/" in key else self._world.point()
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = desired.encode()
        return self._values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        self._world.alive()
        return self._values.pop(key, None) is not None


class _Requests:
    def call(self, request: Callable[[], Any], timeout_s: float) -> Any:
        return request()

    def close(self) -> None:
        pass


class _Measurer:
    """Times by what the operation says, at once."""

    def __init__(self, operation: FakeOperation, cell: Any, policy: Any, spec: Any, *, progress: Callable[[], None], **other: Any) -> None:
        self._operation, self._progress = operation, progress

    def prepare(self, tactics: Sequence[Tactic]) -> None:
        self._progress()
        if self._operation.probe_fault:
            raise KeyError("calibration file")

    def round(self, alive: Sequence[Tactic], *, sweeps: int | None = None) -> Mapping[Tactic, Measurement]:
        return {tactic: Timed(float(self._operation.costs[str(tactic["name"])]), 0.0, 1) for tactic in alive}


class Explorer:
    """crashes: how many ranks may crash in one execution. Counts what it ran."""

    def __init__(self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch, *, crashes: int = 1) -> None:
        self.scenario, self.crashes = scenario, crashes
        self.executions, self.endings = 0, dict[str, int]()
        self._world: World
        clock = SimpleNamespace(
            monotonic=lambda: getattr(self._world._here, "rank", RankState(0)).clock_s,
            sleep=self._sleep, strftime=lambda *form: "now", gmtime=lambda: None, time=lambda: 0.0,
        )  # fmt: skip
        monkeypatch.setattr(RankGroup, "_clock", clock)
        monkeypatch.setattr(rendezvous_module, "_Requests", _Requests)
        monkeypatch.setattr(rounds, "time", clock)
        monkeypatch.setattr(pass_terms, "time", clock)
        monkeypatch.setattr(rounds, "CellMeasurer", _Measurer)
        monkeypatch.setattr(tuner, "build_environment", lambda device, versions: ENVIRONMENT)

    def _sleep(self, seconds: float) -> None:
        self._world.here.clock_s += max(seconds, LOOK_S)

    def some(self, executions: int, seed: int) -> None:
        """Random orders. Now and then a rank is left alone for long, and so lost by its peers."""
        for number in range(executions):
            choice = random.Random(f"{seed}-{number}")
            with self._execution() as world:
                favoured = list(range(self.scenario.size))
                while actions := world.actions(self.crashes):
                    if choice.random() < 0.02:
                        favoured = choice.sample(range(self.scenario.size), choice.randint(1, self.scenario.size))
                    runs = [action for action in actions if action[0] == "run"]
                    liked = [action for action in runs if action[1] in favoured] or runs
                    crash = len(runs) < len(actions) and choice.random() < 0.003
                    world.step(choice.choice([action for action in actions if action[0] == "crash"] if crash else liked))
                self._judge(world)

    def _execution(self) -> _Execution:
        self.executions += 1
        self._world = World(self.scenario)
        return _Execution(self._world)

    # -- the invariants ----------------------------------------------------------------------------------------------------

    def _judge(self, world: World) -> None:
        """At the end of an execution, over the ranks that did not crash."""
        survivors = [rank for rank in world.ranks if not rank.crashed]
        for rank in survivors:
            name = type(rank.error).__name__ if rank.error else "served"
            leaves = rank.index in self.scenario.raises and name == "KeyError"
            if name not in ("served", *self.scenario.allowed) and not leaves:
                world.fail(f"rank {rank.index} ended with {name}: {rank.error}")
            # An aborted pass changes nothing.
            if rank.error and rank.tables[-1] != rank.tables[-2]:
                world.fail(f"rank {rank.index} serves another table after {name}")
            self.endings[name] = self.endings.get(name, 0) + 1
        # No two survivors serve different tables, nor conclude differently.
        loyal = [rank for rank in survivors if rank.index not in (*self.scenario.raises, *self.scenario.closes)]
        if len({(rank.tables[-1], rank.tried) for rank in loyal}) > 1:
            world.fail("survivors serve different tables: " + "; ".join(f"rank {rank.index}: {rank.error!r}" for rank in loyal))
        said = {(type(rank.error), str(rank.error), rank.error.ranks) for rank in loyal if isinstance(rank.error, GroupError)}
        if len(said) > 1:
            world.fail(f"survivors blame differently: {said}")
        # What a survivor serves is what its pass's one key says.
        for rank in loyal:
            value = world.values.get(f"{world.scope}/{code_version()}/1/{rank.tried}/verdict")
            verdict = Verdict.from_text(value.decode()) if value else None
            if rank.error is None and (verdict is None or verdict.committed != rank.tables[-1]):
                world.fail(f"rank {rank.index} serves a table that was not committed: {verdict}")
        if any(rank.crashed for rank in world.ranks):
            self._judge_restart(world)

    def _judge_restart(self, world: World) -> None:
        """The launcher starts all ranks again, over the rendezvous with all that the former ones left: they must agree."""
        again = World(dataclasses.replace(self.scenario, raises=(), closes=()), scope="run-1", values=dict(world.values))
        self._world = again
        with _Execution(again):
            while actions := again.actions(0):
                for action in actions:  # round and round, so that nobody is lost
                    again.step(action)
        if any(rank.error for rank in again.ranks) or len({rank.tables[-1] for rank in again.ranks}) != 1:
            world.fail(f"after a restart: {[rank.error for rank in again.ranks]}")
        self._world = world


class _Execution:
    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> World:
        self._world.start()
        return self._world

    def __exit__(self, *error: Any) -> None:
        self._world.finish()
