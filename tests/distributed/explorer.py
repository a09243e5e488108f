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
import re
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeOperation

from moe_dist.distributed import claim, symmetric
from moe_dist.distributed import epoch as epoch_module
from moe_dist.distributed import rendezvous as rendezvous_module
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.words import Verdict
from moe_dist.errors import GroupError
from moe_dist.process import Process
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning import pass_terms, rounds, tuner
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, Epoch, Measurement, Tactic, Timed, Workspace
from moe_dist.tuning.search import Race, Standing

LOOK_S = 1.3  # a wait looks around every time it wakes: more than any rank's own interval
PROGRESS_TIMEOUT_S = 1.0  # lost at the second look without progress
LIVE = 400  # ranks' threads that are kept where they stand
SETTINGS: dict[str, Any] = {
    "policy": MeasurementPolicy(rounds=1, sweeps=1), "ladder": BucketLadder((1,)), "device": "cpu", "deployment": "explored",
}  # fmt: skip
ENVIRONMENT = build_environment(torch.device("cpu"))

_WORD = re.compile(r"/\d{6}/(?!watch)")  # of a step
Request = tuple[Any, ...]  # what is asked, the key or keys, what else it takes


class Crash(BaseException):
    """Ends a rank's thread between two requests; nothing that it does afterwards reaches the rendezvous."""


class Violation(AssertionError):
    """An invariant does not hold; the message ends with the order of requests that shows it."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """calls: what each rank does, one after the other, before it closes its tuner: "pass", "reload", "pin", and what the functions
    of `_Seat` say. calls_of: those of ranks that do otherwise. looks: after so many in one call a rank has reached its cap. crashes:
    at most so many ranks crash. reborn: "alone", a rank that has crashed starts again with the same calls; "all", all ranks do, as another
    restart of the launcher's, and "all, unsaid", as none that words carry. entries: what the stores of
    `holders` (None: of all) hold; shared: all have one store. without: tactics that a rank can't run. deviates: a rank that picks
    another winner than follows from the words. versions: of ranks with another version. allowed: how a call may end besides well.
    says: what every `RankLost` says. late: a rank may also begin after its peers have given it up, and then leaves them behind.
    slow: so many waits of an order outlast a look while another rank could end them; of those that nobody could end all do.
    """

    size: int = 2
    calls: tuple[str, ...] = ("pass",)
    calls_of: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    strategy: str = "reduce"
    costs: tuple[str, ...] = ("plain", "quick")
    looks: int = 2
    crashes: int = 1
    reborn: str = ""
    entries: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    holders: tuple[int, ...] | None = None
    shared: bool = False
    without: Mapping[int, str] = dataclasses.field(default_factory=dict)
    deviates: int | None = None
    versions: Mapping[int, str] = dataclasses.field(default_factory=dict)
    allowed: tuple[str, ...] = ("RankLost",)
    says: str = ""
    slow: int = 100
    late: bool = False

    @property
    def cap_s(self) -> float:
        return (self.looks + 0.5) * LOOK_S


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one call of a rank ended. error: "" or the type; table: what the rank serves after it; runs: whether it can run that;
    where: the attachment and the pass that it was."""

    call: str
    error: str
    ranks: tuple[int, ...]
    message: str
    table: str
    runs: bool
    where: tuple[int, int]


# -- one rank ------------------------------------------------------------------------------------------------------------------


class _Node:
    """Where a rank is after the answers on the way to here. request: its next one; None: it has ended, as `log` says."""

    __slots__ = ("answer", "before", "children", "cost", "kind", "life", "log", "rank", "request", "waiting")

    def __init__(
        self,
        rank: int,
        before: _Node | None,
        answer: Any,
        request: Request | None,
        log: tuple[Ended, ...],
        life: int,
        looking: bool = False,
        began: bool = False,
        fresh: bool = False,
        late: bool = False,
    ) -> None:
        self.rank, self.before, self.answer, self.request, self.log, self.life = rank, before, answer, request, log, life
        self.children: dict[Any, _Node] = {}
        begins = not began and request is not None and request[0] == "check" and request[1][0].endswith("/1/verdict")
        self.kind = _kind(request, looking or (begins and not late))
        self.cost = int(fresh and not begins)  # of missing it: a wait begins that outlasts a look
        self.waiting: _Node | None = None  # the same place, when it has chosen to wait for what it asks

    def choose_to_wait(self) -> _Node:
        if self.waiting is None:
            self.waiting = _Node(self.rank, self.before, self.answer, self.request, self.log, self.life)
            self.waiting.kind, self.waiting.children, self.waiting.cost = "waits", self.children, self.cost
        return self.waiting

    def history(self) -> list[tuple[Request, Any]]:
        """(request, answer) from the beginning to here."""
        told: list[tuple[Request, Any]] = []
        node = self
        while node.before is not None:
            assert node.before.request is not None
            told.append((node.before.request, node.answer))
            node = node.before
        return told[::-1]


def _kind(request: Request | None, looking: bool) -> str:
    """ "ended"; "free": one with the request before; "asks": may wait for the answer; "writes": what others can notice."""
    if request is None:
        return "ended"
    what, key = request[0], str(request[1])
    if what == "check":
        return "free" if looking or any(word in key for word in ("/progress/", "/version/", "/claim/")) else "asks"
    quiet = "/version/" in key or "/claim/" in key or ("/progress/" in key and request[-1] != b"closed")
    return "writes" if what in ("set", "settle", "pause") and not quiet else "free"


class _Live(threading.local):
    rank: _Thread


_here = _Live()


class _Thread:
    """A rank's thread, parked at its next request. It first takes the answers of `history`, without asking."""

    def __init__(self, scenario: Scenario, index: int, life: int, history: list[tuple[Request, Any]]) -> None:
        self.scenario, self.index, self.life = scenario, index, life
        self.clock_s, self.started_s, self.spoke_s = 0.0, 0.0, 0.0  # spoke: said its last word
        self.log: list[Ended] = []
        self.request: Request | None = None
        self.fault: BaseException | None = None
        self.looking = False  # between a look at who watches and the pause after it: the look is taken at one moment
        self.fresh = True  # not in a wait, or before its first pause
        self.began = False  # it has said a word in this attachment
        self.told: list[tuple[Request, Any]] = []  # what it was answered, looks aside
        self.group: RankGroup | None = None
        self._history, self._at, self._answer, self._crashed = history, 0, None, False
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._thread.start()
        self._back.acquire()

    def go_on(self, answer: Any) -> None:
        self._answer = answer
        self._go.release()
        self._back.acquire()

    def crash(self) -> None:
        self._crashed = True
        if self.request is not None:
            self.go_on(None)
        self._thread.join(10)

    def ask(self, *request: Any) -> Any:
        if self._crashed:
            raise Crash
        self.fresh = self.fresh or request[0] != "check"
        if request[0] == "settle":
            self.looking = "/watch/" in request[1]
        elif request[0] == "set" and _WORD.search(request[1]):
            self.looking, self.began, self.spoke_s = False, True, self.clock_s
        elif request[0] == "add":
            self.began = False
        if self._at < len(self._history):
            asked, answer = self._history[self._at]
            self._at += 1
            assert asked == request, f"after the same answers rank {self.index} asked {asked}, and now {request}"
        else:
            self.request = request
            self._back.release()
            self._go.acquire()
            if self._crashed:
                raise Crash
            answer = self._answer
        if request[0] not in ("check", "set", "delete") and not any(
            word in str(request[1]) for word in ("/watch/", "/progress/", "/version/")
        ):
            self.told.append((request, answer))
        return answer

    def knows(self) -> tuple[Any, ...] | None:
        """What all that it does from here follows from; None: it is in the middle of a wait, and all its looks may count.

        Of the looks of a wait that has ended nothing is left but the time that they took, and what the group keeps.
        """
        if self.request is None:
            return (self.index, self.life, tuple(self.log))
        closes = "/progress/" in str(self.request[1])
        if self.request[0] != "set" or not (closes or _WORD.search(self.request[1])) or self.group is None:
            return None
        times = {"_pass_start": self.scenario.cap_s + LOOK_S, "_progress_sent": LOOK_S}  # beyond which they make no difference
        kept = {name: value for name, value in vars(self.group).items() if name not in ("_rendezvous", "_claim", *times)}
        ago = tuple(round(min(self.clock_s - getattr(self.group, name), most), 3) for name, most in times.items())
        return (self.index, self.life, self.request, repr(sorted(kept.items())), ago, tuple(self.told), tuple(self.log))

    def sleep(self, seconds: float) -> None:
        self.looking, self.fresh = False, False
        self.clock_s += max(seconds, LOOK_S)
        # Over the cap one rank watches, and another takes its place a look later: as often as there are ranks.
        if self.clock_s > max(self.started_s + self.scenario.cap_s, self.spoke_s) + (2 + self.scenario.size) * LOOK_S:
            raise Violation("a rank waits past its cap")

    def _body(self) -> None:
        _here.rank = self
        try:
            _Seat(self).take()
        except Crash:
            pass
        except BaseException as fault:  # handed to the main thread
            self.fault = fault
        self.request = None
        self._back.release()


class _Seat:
    """What a rank does in a scenario."""

    def __init__(self, thread: _Thread) -> None:
        self._thread, self._scenario, self._index = thread, thread.scenario, thread.index
        objection = self._scenario.without.get(self._index)
        self._operation = _Operation(
            "explored", {name: 10.0 * (2 - at) + self._index * at for at, name in enumerate(self._scenario.costs)},
            objections={objection: "not on this rank"} if objection else {},
        )  # fmt: skip

    def take(self) -> None:
        scenario, index = self._scenario, self._index
        calls = collections.deque(scenario.calls_of.get(index, scenario.calls))
        open_tuner = self._open()
        while calls:
            call = calls.popleft()
            self._thread.started_s = self._thread.clock_s
            try:
                if call == "reopen":
                    open_tuner.close()
                    open_tuner = self._open(before=open_tuner)
                    continue
                getattr(self, f"_{call}")(open_tuner)
            except AssertionError:
                raise
            except Exception as error:  # judged by its kind
                self._ended(call, error, open_tuner)
                open_tuner.withdraw("as the block ends")
                break
            self._ended(call, None, open_tuner)
        open_tuner.close()

    def _open(self, before: tuner.Tuner | None = None) -> tuner.Tuner:
        scenario, index = self._scenario, self._index
        deadlines = {"progress_timeout": timedelta(seconds=PROGRESS_TIMEOUT_S), "cap": timedelta(seconds=scenario.cap_s)}
        version = scenario.versions.get(index, "this")
        scope = f"run-{self._thread.life}" if scenario.reborn == "all" else "run"
        group = RankGroup(_Rendezvous(), index, scenario.size, scope=scope, version=version, **deadlines)  # type: ignore[arg-type]
        self._thread.group = group
        store = _Store("all" if scenario.shared else str(index))
        opened = tuner.Tuner(store=store, group=group, strategy=scenario.strategy, **SETTINGS)
        if before is not None:
            opened.epoch = before.epoch
        return opened

    def _ended(self, call: str, error: BaseException | None, tuned: tuner.Tuner) -> None:
        culprits = error.ranks if isinstance(error, GroupError) else ()
        runs = all(self._operation.why_not(winner.tactic, cell.bucket) is None for cell, winner in tuned.epoch.winners.items())
        name = "" if error is None else type(error).__name__
        self._thread.log.append(
            Ended(call, name, tuple(culprits), str(error or ""), tuned.epoch.digest, runs, (tuned.group._attachment, tuned.group._pass))
        )

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def _pass(self, tuned: tuner.Tuner) -> None:
        tuned.record(self._operation)
        tuned.run_pass()

    def _reload(self, tuned: tuner.Tuner) -> None:
        tuned.record(self._operation)
        tuned.reload()

    def _raises(self, tuned: tuner.Tuner) -> None:
        """A pass that is left by an exception of the operation's own."""
        self._operation.probe_fault = "raise"
        self._pass(tuned)

    def _crawls(self, tuned: tuner.Tuner) -> None:
        """A pass in which this rank moves, and does not arrive before all have reached their cap."""
        self._operation.probe_fault = "crawl"
        self._pass(tuned)

    def _pin(self, tuned: tuner.Tuner) -> None:
        tuned.pin()

    def _withdraw(self, tuned: tuner.Tuner) -> None:
        tuned.withdraw("it leaves")


class _Operation(FakeOperation):
    def workspace(self, wanted: Tactic, num_tokens: int) -> Workspace:
        return Workspace(64, symmetric=True) if wanted.collective else Workspace()


class _Rendezvous:
    """A torch.distributed Store whose every request is asked of the explorer."""

    def clone(self) -> _Rendezvous:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        _here.rank.ask("set", key, value.encode() if isinstance(value, str) else value)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(_here.rank.ask("get", tuple(keys)))

    def get(self, key: str) -> bytes:
        value: bytes = _here.rank.ask("get", (key,))[0]
        return value

    def check(self, keys: Sequence[str]) -> bool:
        there: bool = _here.rank.ask("check", tuple(keys))
        return there

    def add(self, key: str, amount: int) -> int:
        total: int = _here.rank.ask("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        settled: bytes = _here.rank.ask("settle", key, expected.encode(), desired.encode())
        return settled

    def delete_key(self, key: str) -> bool:
        was_there: bool = _here.rank.ask("delete", key)
        return was_there


class _Store:
    """A winner store, shared by all ranks that open the same name."""

    degraded = None

    def __init__(self, name: str) -> None:
        self.url, self._prefix = f"explored:{name}", f"store/{name}/"

    def get(self, key: str) -> bytes | None:
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        found = _here.rank.ask("find", tuple(self._prefix + key for key in wanted))
        return {key: value for key, value in zip(wanted, found, strict=True) if value is not None}

    def put(self, key: str, value: bytes) -> bool:
        _here.rank.ask("set", self._prefix + key, value)
        return True

    def delete(self, key: str) -> None:
        _here.rank.ask("delete", self._prefix + key)

    def list(self, prefix: str) -> list[str]:
        return [key.removeprefix(self._prefix) for key in _here.rank.ask("list", f"{self._prefix}{prefix}/")]

    def close(self) -> None:
        pass


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
        if self._operation.probe_fault == "raise":
            raise KeyError("calibration file")
        if self._operation.probe_fault == "crawl":
            rank = _here.rank
            for _ in range(rank.scenario.looks + 3):
                rank.ask("pause", "crawls")
                rank.clock_s += LOOK_S
                self._progress()
            rank.started_s = rank.clock_s

    def round(self, alive: Sequence[Tactic], *, sweeps: int | None = None) -> Mapping[Tactic, Measurement]:
        return {tactic: self.run_counted(tactic, 1, 1) for tactic in alive}

    def bind(self, tactic: Tactic) -> str | None:
        return None

    def run_counted(self, tactic: Tactic, windows: int, calls: int) -> Measurement:
        return Timed(float(self._operation.costs[str(tactic["name"])]), 0.0, 1)


class _Race(Race):
    """A rank that deviates lets the default win."""

    def winner(self) -> Standing | None:
        deviates = _here.rank.index == _here.rank.scenario.deviates
        return self.standing(self.default) if deviates else super().winner()


class _Path:
    """A name in the shared memory of a host."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __truediv__(self, name: str) -> _Path:
        return _Path(name)

    def __str__(self) -> str:
        return f"shm/{self._name}"

    def unlink(self, missing_ok: bool) -> None:
        _here.rank.ask("delete", str(self))


def _make(path: _Path, nbytes: int) -> None:
    _here.rank.ask("set", str(path), b"arena")


def _open(path: _Path, group: RankGroup, nbytes: int) -> Any:
    if _here.rank.ask("find", (str(path),))[0] is None:
        raise FileNotFoundError(f"there is no {path}")  # as after a peer has left
    return SimpleNamespace(nbytes=nbytes, failed=None, leave=lambda: None)


def stored(costs: Sequence[str] = ("plain", "quick")) -> dict[str, bytes]:
    """The entries that a pass over the operation leaves: one that finds them hits, and so has fewer steps. And its epoch."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as monkeypatch, tuner.Tuner(store=store, **SETTINGS) as before:
        monkeypatch.setattr(rounds, "CellMeasurer", _Measurer)  # a loaded machine must not choose another winner
        before.record(FakeOperation("explored", {name: 10.0 * (2 - at) for at, name in enumerate(costs)}))
        before.run_pass()
        assert {str(winner.tactic["name"]) for winner in before.epoch.winners.values()} == {costs[-1]}
    return {key: store.get(key) or b"" for key in store.list("")}


# -- all of them ------------------------------------------------------------------------------------------------------------------

_GONE = b"gone"
State = tuple[tuple[_Node | str, ...], int, int, int]  # ranks, what is held, crashes, waits that outlasted a look


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
                return key in held, self.put(board, key, _GONE if _WORD.search(key) else None)
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
        self._live: collections.OrderedDict[_Node, _Thread] = collections.OrderedDict()
        self._same: dict[tuple[Any, ...], _Node] = {}  # by what a rank knows
        self._roots: dict[tuple[int, int], _Node] = {}
        self.replays = 0
        clock = SimpleNamespace(
            monotonic=lambda: _here.rank.clock_s, sleep=lambda seconds: _here.rank.sleep(seconds), time=lambda: 0.0,
            strftime=lambda *form: "now", gmtime=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(RankGroup, "_clock", clock)
        monkeypatch.setattr(pass_terms, "time", clock)
        monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: 0.0))  # how long a round took is a word: none takes any time
        monkeypatch.setattr(rendezvous_module, "_Requests", _Requests)
        monkeypatch.setattr(claim, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="claim")))
        monkeypatch.setattr(Process, "this", lambda: Process("host", "boot", "", 1 + _here.rank.index, float(_here.rank.life)))
        monkeypatch.setattr(Process, "runs", lambda process: False)  # who is asked for has crashed
        monkeypatch.setattr(epoch_module, "SHARED_MEMORY", Path("/dev/null/none"))
        monkeypatch.setattr(symmetric, "FOLDER", _Path())
        monkeypatch.setattr(symmetric, "_make", _make)
        monkeypatch.setattr(symmetric, "_open", _open)
        monkeypatch.setattr(symmetric, "secrets", SimpleNamespace(token_hex=lambda count: f"of-rank-{_here.rank.index}"))
        monkeypatch.setattr(rounds, "CellMeasurer", _Measurer)
        monkeypatch.setattr(rounds, "Race", _Race)
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
        board, ranks = self.boards.first, list[_Node | str]()
        for index in range(self.scenario.size):
            node, board = self._born(index, 0, board)
            ranks.append(node)
        return tuple(ranks), board, 0, 0

    def _born(self, index: int, life: int, board: int) -> tuple[_Node, int]:
        if (index, life) not in self._roots:
            self._roots[index, life] = self._node(_Thread(self.scenario, index, life, []), None, None)
        return self._freely(self._roots[index, life], board)

    def follow(self, state: State) -> list[tuple[str, State]]:
        """(what happens, the state after it), for all that may happen next."""
        ranks, board, crashes, slow = state
        held = self.boards.contents[board]
        asking = [node for node in ranks if isinstance(node, _Node) and node.kind in ("asks", "waits")]
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
            if isinstance(node, _Node) and node.kind == "writes":
                assert node.request is not None
                found.append((f"{node.rank} {_named(node.request)}", self._moved(state, node, node.request)))
                if crashes < self.scenario.crashes:
                    found.append((f"{node.rank} crashes", self._crashed(state, node)))
        if not found:  # who waits goes on without
            for node in asking:
                assert node.request is not None
                found.append((f"{node.rank} misses {_named(node.request)}", self._moved(state, node, node.request)))
        return found

    def _moved(self, state: State, node: _Node, request: Request, cost: int = 0) -> State:
        ranks, board, crashes, slow = state
        answer, board = self.boards.answer(request, board)
        moved, board = self._freely(self._child(node, answer), board)
        return _put(ranks, node.rank, moved), board, crashes, slow + cost

    def _crashed(self, state: State, node: _Node) -> State:
        ranks, board, crashes, slow = state
        if not self.scenario.reborn or node.life:
            return _put(ranks, node.rank, "crashed"), board, crashes + 1, slow
        for index in range(self.scenario.size) if self.scenario.reborn != "alone" else [node.rank]:
            born, board = self._born(index, node.life + 1, board)
            ranks = _put(ranks, index, born)
        return ranks, board, crashes + 1, slow

    def _freely(self, node: _Node, board: int) -> tuple[_Node, int]:
        """As far as the rank comes without what others could notice, or could answer otherwise."""
        while node.kind == "free":
            assert node.request is not None
            answer, board = self.boards.answer(node.request, board)
            node = self._child(node, answer)
        return node, board

    def _child(self, node: _Node, answer: Any) -> _Node:
        if answer not in node.children:
            base = node if node.kind != "waits" else None
            thread = self._live.pop(node, None)
            if thread is None:
                self.replays += 1
                thread = _Thread(self.scenario, node.rank, node.life, node.history())
                assert base is None or thread.request == node.request
            thread.go_on(answer)
            node.children[answer] = self._node(thread, node, answer)
        return node.children[answer]

    def _node(self, thread: _Thread, before: _Node | None, answer: Any) -> _Node:
        if thread.fault is not None:
            raise thread.fault
        if (knows := thread.knows()) is not None and (same := self._same.get(knows)) is not None:
            if same not in self._live and thread.request is not None:
                self._keep(same, thread)
            else:
                thread.crash()
            return same
        node = _Node(
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

    def _keep(self, node: _Node, thread: _Thread) -> None:
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
                    did, state = choice.choice(rare if rare and choice.random() < 0.003 else liked)
                    path.append(did)
                    found.states += 1
                self._judge(state, found)
            except Violation as why:
                raise Violation(f"{why}: {'; '.join(path)}") from None
        return found

    # -- the invariants ----------------------------------------------------------------------------------------------------------------

    def _judge(self, state: State, found: Explored) -> None:
        ranks, board, *_ = state
        logs = {node.rank: node.log for node in ranks if isinstance(node, _Node)}
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


def _put(ranks: tuple[_Node | str, ...], at: int, rank: _Node | str) -> tuple[_Node | str, ...]:
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
