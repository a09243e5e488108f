"""Runs the real code of several ranks in one process, one request to the rendezvous at a time, in every order or in random ones.

A rank is a function of the answers that it got: the same answers lead to the same next request, which is checked. So a rank is a
place in a tree of answers, the whole is one place for each rank and what the rendezvous holds, and of that every successor can be
visited once. The rendezvous, the stores, the clock, shared memory and the timing of candidates are simulated, everything else is the
code that serves: `RankGroup`, `Tuner`, the pass in each strategy, the reload, the reserve step. A rank's clock moves only while
it waits, so a rank that is not chosen for long is lost to its peers, and wakes later: slow, stopped and late ranks are orders.

What need not be tried apart, and why:
- What a rank asks for is there for good once it is there (words, bytes, verdicts; asking for one that was taken away is a violation).
  So finding it is one with the request before, and so is missing it; a rank that could miss it also waits for it, as long as others can do anything.
- Counts of progress and versions, entries, and what ends a key's life are one with the request before: whoever reads them reads
  them between the same writes of others in another order.
- A crash changes nothing but what is not written any more: ranks crash before what they write.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
import random
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.explored_rank import (
    ENVIRONMENT,
    LIVE,
    WORD,
    ExploredRace,
    FakePath,
    Measurer,
    Node,
    RankThread,
    Request,
    Requests,
    Scenario,
    Violation,
    here,
    make_memory,
    open_memory,
)

from moe_dist.distributed import claim, symmetric
from moe_dist.distributed import epoch as epoch_module
from moe_dist.distributed import rendezvous as rendezvous_module
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.words import Verdict
from moe_dist.process import Process
from moe_dist.tuning import pass_terms, rounds, tuner
from moe_dist.tuning.problem import Epoch

_GONE = b"gone"
State = tuple[tuple[Node | str, ...], int, int, int]  # ranks, what is held, crashes, waits that outlasted a look


class _Boards:
    """What the rendezvous, the stores and the host's memory hold, each content once, under a number."""

    def __init__(self, first: Mapping[str, bytes]) -> None:
        self._numbers: dict[frozenset[tuple[str, bytes]], int] = {}
        self._changes: dict[tuple[int, str, bytes | None], int] = {}
        self.contents: list[Mapping[str, bytes]] = []
        self.first = self._number(first)

    def _number(self, content: Mapping[str, bytes]) -> int:
        number = self._numbers.setdefault(frozenset(content.items()), len(self.contents))
        if number == len(self.contents):
            self.contents.append(content)
        return number

    def put(self, board: int, key: str, value: bytes | None) -> int:
        if (changed := self._changes.get((board, key, value))) is None:
            content = {**self.contents[board], key: value}
            changed = self._number({key: value for key, value in content.items() if value is not None})
            self._changes[board, key, value] = changed
        return changed

    def answer(self, request: Request, board: int) -> tuple[Any, int]:
        """What a request is answered, and what is held after it."""
        held = self.contents[board]
        match request:
            case ("set", key, value):
                return None, self.put(board, key, value)
            case ("get", keys):
                for key in keys:
                    if held.get(key, _GONE) == _GONE:
                        raise Violation(f"{key} is read when it is {'gone' if key in held else 'not there'}")
                return tuple(held[key] for key in keys), board
            case ("check", keys):
                if gone := [key for key in keys if held.get(key) == _GONE]:
                    raise Violation(f"{gone[0]} is waited for when it is gone")
                return all(key in held for key in keys), board
            case ("add", key, amount):
                total = int(held.get(key, b"0")) + amount
                return total, self.put(board, key, str(total).encode())
            case ("settle", key, expected, desired):
                if held.get(key, b"") == expected:
                    return desired, self.put(board, key, desired)
                return held.get(key, expected), board
            case ("delete", key):
                return key in held, self.put(board, key, _GONE if WORD.search(key) else None)
            case ("find", keys):
                return tuple(held.get(key) for key in keys), board
            case ("list", prefix):
                return tuple(sorted(key for key in held if key.startswith(prefix))), board
            case ("pause", _):
                return None, board
        raise AssertionError(request)


@dataclasses.dataclass
class Explored:
    """states: that were reached; endings: how calls ended in them, and how often that was all that ranks of an order came to."""

    states: int = 0
    endings: collections.Counter[tuple[str, ...]] = dataclasses.field(default_factory=collections.Counter)

    @property
    def ends(self) -> set[str]:
        return {end for ending in self.endings for end in ending}


class Explorer:
    """Use as a context: inside, the code sees the simulated world."""

    def __init__(self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scenario = scenario
        names = ["all"] if scenario.shared else [str(index) for index in scenario.holders or range(scenario.size)]
        first = {f"store/{name}/{key}": value for name in names for key, value in scenario.entries.items()}
        self.boards = _Boards(first)
        self._live: collections.OrderedDict[Node, RankThread] = collections.OrderedDict()
        self._same: dict[tuple[Any, ...], Node] = {}  # by what a rank knows
        self._roots: dict[tuple[int, int], Node] = {}
        self.replays = 0
        clock = SimpleNamespace(
            monotonic=lambda: here.rank.clock_s, sleep=lambda seconds: here.rank.sleep(seconds), time=lambda: 0.0,
            strftime=lambda *form: "now", gmtime=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(RankGroup, "_clock", clock)
        monkeypatch.setattr(pass_terms, "time", clock)
        monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: 0.0))  # how long a round took is a word: none takes any time
        monkeypatch.setattr(rendezvous_module, "_Requests", Requests)
        monkeypatch.setattr(claim, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="claim")))
        monkeypatch.setattr(Process, "this", lambda: Process("host", "boot", "", 1 + here.rank.index, float(here.rank.life)))
        monkeypatch.setattr(Process, "runs", lambda process: False)  # who is asked for has crashed
        monkeypatch.setattr(epoch_module, "SHARED_MEMORY", Path("/dev/null/none"))
        monkeypatch.setattr(symmetric, "FOLDER", FakePath())
        monkeypatch.setattr(symmetric, "_make", make_memory)
        monkeypatch.setattr(symmetric, "_open", open_memory)
        monkeypatch.setattr(symmetric, "secrets", SimpleNamespace(token_hex=lambda count: f"of-rank-{here.rank.index}"))
        monkeypatch.setattr(rounds, "CellMeasurer", Measurer)
        monkeypatch.setattr(rounds, "Race", ExploredRace)
        monkeypatch.setattr(tuner, "build_environment", lambda device, versions: ENVIRONMENT)
        monkeypatch.setattr(logging.getLogger("moe_dist.tuning"), "disabled", True)

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._live.values():
            thread.crash()
        self._live.clear()

    # -- what may happen next --------------------------------------------------------------------------------------------------------

    def begin(self) -> State:
        board, ranks = self.boards.first, list[Node | str]()
        for index in range(self.scenario.size):
            node, board = self._born(index, 0, board)
            ranks.append(node)
        return tuple(ranks), board, 0, 0

    def _born(self, index: int, life: int, board: int) -> tuple[Node, int]:
        if (index, life) not in self._roots:
            self._roots[index, life] = self._node(RankThread(self.scenario, index, life, []), None, None)
        return self._freely(self._roots[index, life], board)

    def follow(self, state: State) -> list[tuple[str, State]]:
        """(what happens, the state after it), for all that may happen next."""
        ranks, board, crashes, slow = state
        held = self.boards.contents[board]
        asking = [node for node in ranks if isinstance(node, Node) and node.kind in ("asks", "waits")]
        for node in asking:
            assert node.request is not None
            there = all(key in held for key in node.request[1])
            if there or node.kind == "asks":
                what = _named(node.request)
                if there:
                    return [(f"{node.rank} finds {what}", self._moved(state, node, node.request))]
                after = [(f"{node.rank} waits for {what}", (_put(ranks, node.rank, node.choose_to_wait()), board, crashes, slow))]
                if slow + node.cost <= self.scenario.slow:
                    after.append((f"{node.rank} misses {what}", self._moved(state, node, node.request, node.cost)))
                return after
        found: list[tuple[str, State]] = []
        for node in ranks:
            if isinstance(node, Node) and node.kind == "writes":
                assert node.request is not None
                found.append((f"{node.rank} {_named(node.request)}", self._moved(state, node, node.request)))
                if crashes < self.scenario.crashes:
                    found.append((f"{node.rank} crashes", self._crashed(state, node)))
        if not found:  # who waits goes on without
            for node in asking:
                assert node.request is not None
                found.append((f"{node.rank} misses {_named(node.request)}", self._moved(state, node, node.request)))
        return found

    def _moved(self, state: State, node: Node, request: Request, cost: int = 0) -> State:
        ranks, board, crashes, slow = state
        answer, board = self.boards.answer(request, board)
        moved, board = self._freely(self._child(node, answer), board)
        return _put(ranks, node.rank, moved), board, crashes, slow + cost

    def _crashed(self, state: State, node: Node) -> State:
        ranks, board, crashes, slow = state
        if not self.scenario.reborn or node.life:
            return _put(ranks, node.rank, "crashed"), board, crashes + 1, slow
        for index in range(self.scenario.size) if self.scenario.reborn != "alone" else [node.rank]:
            born, board = self._born(index, node.life + 1, board)
            ranks = _put(ranks, index, born)
        return ranks, board, crashes + 1, slow

    def _freely(self, node: Node, board: int) -> tuple[Node, int]:
        """As far as the rank comes without what others could notice, or could answer otherwise."""
        while node.kind == "free":
            assert node.request is not None
            answer, board = self.boards.answer(node.request, board)
            node = self._child(node, answer)
        return node, board

    def _child(self, node: Node, answer: Any) -> Node:
        if answer not in node.children:
            base = node if node.kind != "waits" else None
            thread = self._live.pop(node, None)
            if thread is None:
                self.replays += 1
                thread = RankThread(self.scenario, node.rank, node.life, node.history())
                assert base is None or thread.request == node.request
            thread.go_on(answer)
            node.children[answer] = self._node(thread, node, answer)
        return node.children[answer]

    def _node(self, thread: RankThread, before: Node | None, answer: Any) -> Node:
        if thread.fault is not None:
            raise thread.fault
        if (knows := thread.knows()) is not None and (same := self._same.get(knows)) is not None:
            if same not in self._live and thread.request is not None:
                self._keep(same, thread)
            else:
                thread.crash()
            return same
        node = Node(
            thread.index,
            before,
            answer,
            thread.request,
            tuple(thread.log) if thread.request is None else (),
            thread.life,
            thread.looking,
            thread.began,
            thread.fresh,
            self.scenario.late,
        )
        if knows is not None:
            self._same[knows] = node
        if thread.request is not None:
            self._keep(node, thread)
        return node

    def _keep(self, node: Node, thread: RankThread) -> None:
        self._live[node] = thread
        if len(self._live) > LIVE:
            self._live.popitem(last=False)[1].crash()

    # -- orders ----------------------------------------------------------------------------------------------------------------------

    def all(self) -> Explored:
        """Follow everything that may happen, breadth first. Violation: an invariant broke; the shortest order that shows it."""
        start = self.begin()
        came: dict[State, tuple[State, str] | None] = {start: None}
        queue, found = collections.deque([start]), Explored()
        while queue:
            state = queue.popleft()
            try:
                following = self.follow(state)
                if not following:
                    self._judge(state, found)
            except Violation as why:
                raise Violation(f"{why}: {'; '.join(_path(came, state))}") from None
            for did, after in following:
                if after not in came:
                    came[after] = (state, did)
                    queue.append(after)
        found.states = len(came)
        return found

    def some(self, orders: int, seed: int) -> Explored:
        """Random orders. Now and then a rank is left alone for long, and so lost by its peers."""
        found = Explored()
        for number in range(orders):
            choice, state, path = random.Random(f"{seed}-{number}"), self.begin(), list[str]()
            favoured = list(range(self.scenario.size))
            try:
                while following := self.follow(state):
                    if choice.random() < 0.02:
                        favoured = choice.sample(range(self.scenario.size), choice.randint(1, self.scenario.size))
                    rare = [step for step in following if step[0].endswith("crashes")]
                    usual = [step for step in following if not step[0].endswith("crashes")]
                    liked = [step for step in usual if int(step[0].split()[0]) in favoured] or usual
                    did, state = choice.choice(rare if rare and choice.random() < 0.024 / self.scenario.size else liked)
                    path.append(did)
                    found.states += 1
                self._judge(state, found)
            except Violation as why:
                raise Violation(f"{why}: {'; '.join(path)}") from None
        return found

    # -- the invariants ----------------------------------------------------------------------------------------------------------------

    def _judge(self, state: State, found: Explored) -> None:
        ranks, board, *_ = state
        logs = {node.rank: node.log for node in ranks if isinstance(node, Node)}
        held = self.boards.contents[board]
        verdicts = [Verdict.from_text(value.decode()) for key, value in held.items() if key.endswith("/verdict")]
        committed = {verdict.committed for verdict in verdicts} | {Epoch(deployment="explored").digest}
        faulty = {"raises", "crawls", "withdraw"}
        for log in logs.values():
            for at, ended in enumerate(log):
                if ended.error not in ("", *self.scenario.allowed) and ended.call not in faulty:
                    raise Violation(f"a call ended with {ended.error}: {ended.message}")
                if ended.error == "RankLost" and self.scenario.says not in ended.message:
                    raise Violation(f"a rank says {ended.message}")
                if any(former.call == "pin" for former in log[:at]) and ended.table != log[at - 1].table:
                    raise Violation("an epoch is replaced that is pinned")
                if ended.error and ended.table != (log[at - 1].table if at else Epoch(deployment="explored").digest):
                    raise Violation("a call that failed changed what is served")
                if ended.table not in committed:
                    raise Violation("a table is served that was not committed")
                if not ended.runs:
                    raise Violation("a rank serves what it can't run")
        loyal = [ended for log in logs.values() for ended in log if ended.call not in (*faulty, "pin")]
        for where in {ended.where for ended in loyal}:
            ends = [ended for ended in loyal if ended.where == where]
            if len({ended.table for ended in ends}) > 1:
                raise Violation("two survivors serve different tables")
            if len({(ended.error, ended.ranks, ended.message) for ended in ends}) > 1:
                raise Violation(f"survivors end differently: {', '.join(ended.error or 'well' for ended in ends)}")
        for key in held.keys() - self.boards.contents[self.boards.first].keys():
            if "/epochs/" in key and key.rsplit("/", 1)[1].split("-")[2] not in committed:
                raise Violation("an epoch is published that was not committed")
            if "/entries/" in key and not any(verdict.committed for verdict in verdicts):
                raise Violation("an entry is published by a pass that was not committed")
        found.endings[tuple(sorted({ended.error for log in logs.values() for ended in log}))] += 1


def _put(ranks: tuple[Node | str, ...], at: int, rank: Node | str) -> tuple[Node | str, ...]:
    return (*ranks[:at], rank, *ranks[at + 1 :])


def _path(came: Mapping[State, tuple[State, str] | None], state: State) -> list[str]:
    path: list[str] = []
    while (before := came[state]) is not None:
        state, did = before
        path.append(did)
    return path[::-1]


def _named(request: Request) -> str:
    """A request in few words, the common part of its key left out."""
    what, key = request[0], request[1] if isinstance(request[1], str) else request[1][-1]
    key = key.removeprefix("run/this/")
    if what == "check":
        return str(key)
    if what == "settle":
        return f"settles {key}"
    return f"says {key}" if what == "set" else str(key)


# -- guards taken out -------------------------------------------------------------------------------------------------------------


def replace_in_code(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, text: str, instead: str) -> None:
    """The function `name` of a module or class, with one piece of its source replaced."""
    function = inspect.getattr_static(owner, name)
    function = function.fget if isinstance(function, property) else function
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    assert source.count(text) == 1, f"{name} has {text!r} {source.count(text)} times: say anew what this guard is"
    module = inspect.getmodule(function)
    assert module is not None
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(text, instead), module.__dict__, made)
    monkeypatch.setattr(owner, name, made[name])
