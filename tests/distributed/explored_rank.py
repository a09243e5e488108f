"""One rank of the explorer: a thread that runs the real code, and the surroundings that ask the explorer for each answer.

The rendezvous, the stores, the clock, shared memory and the timing of candidates are simulated here, everything else is the code that
serves. `explorer.py` chooses the orders.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeOperation

from moe_dist.distributed.group import RankGroup
from moe_dist.errors import GroupError
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning import rounds, tuner
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, Measurement, Tactic, Timed, Workspace
from moe_dist.tuning.search import Race, Standing

LOOK_S = 1.3  # a wait looks around every time it wakes: more than any rank's own interval
PROGRESS_TIMEOUT_S = 1.0  # lost at the second look without progress
LIVE = 400  # ranks' threads that are kept where they stand
SETTINGS: dict[str, Any] = {
    "policy": MeasurementPolicy(rounds=1, sweeps=1), "ladder": BucketLadder((1,)), "device": "cpu", "deployment": "explored",
}  # fmt: skip
ENVIRONMENT = build_environment(torch.device("cpu"))

WORD = re.compile(r"/\d{6}/(?!watch)")  # of a step
Request = tuple[Any, ...]  # what is asked, the key or keys, what else it takes


HOLDS_NOTHING = ("_member", "_rendezvous", "member_rendezvous", "member_claim")  # of what a rank does next


class Crash(BaseException):
    """Ends a rank's thread between two requests; nothing that it does afterwards reaches the rendezvous."""


class Violation(AssertionError):
    """An invariant does not hold; the message ends with the order of requests that shows it."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """calls: what each rank does, one after the other, before it closes its tuner: "pass", "reload", "pin", and what the functions
    of `_Seat` say. calls_of: those of ranks that do otherwise. looks: after so many in one call a rank has reached its cap. crashes:
    at most so many ranks crash. reborn: "alone", a rank that has crashed starts again with the same calls; "all", all ranks do, as another
    restart of the launcher's, and "all, unsaid", as none that words carry; renewed: their version then. entries: what the stores of
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
    renewed: str = "this"
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
    where: the attachment and the pass that it was, and whether the rank has become one of another version."""

    call: str
    error: str
    ranks: tuple[int, ...]
    message: str
    table: str
    runs: bool
    where: tuple[int, int, bool]


class Node:
    """Where a rank is after the answers on the way to here. request: its next one; None: it has ended, as `log` says."""

    __slots__ = ("answer", "before", "children", "cost", "kind", "life", "log", "rank", "request", "waiting")

    def __init__(
        self,
        rank: int,
        before: Node | None,
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
        self.children: dict[Any, Node] = {}
        begins = not began and request is not None and request[0] == "check" and request[1][0].endswith("/1/verdict")
        self.kind = _kind(request, looking or (begins and not late))
        self.cost = int(fresh and not begins)  # of missing it: a wait begins that outlasts a look
        self.waiting: Node | None = None  # the same place, when it has chosen to wait for what it asks

    def choose_to_wait(self) -> Node:
        if self.waiting is None:
            self.waiting = Node(self.rank, self.before, self.answer, self.request, self.log, self.life)
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
    rank: RankThread


here = _Live()


class RankThread:
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
        elif request[0] == "set" and WORD.search(request[1]):
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
        if self.request[0] != "set" or not (closes or WORD.search(self.request[1])) or self.group is None:
            return None
        times = {"_pass_start": self.scenario.cap_s + LOOK_S, "_progress_sent": LOOK_S}  # beyond which they make no difference
        state = vars(self.group) | {f"member{name}": value for name, value in vars(self.group._member).items()}
        kept = {name: value for name, value in state.items() if name not in HOLDS_NOTHING and name not in times}
        ago = tuple(round(min(self.clock_s - getattr(self.group, name), most), 3) for name, most in times.items())
        return (self.index, self.life, self.request, repr(sorted(kept.items())), ago, tuple(self.told), tuple(self.log))

    def sleep(self, seconds: float) -> None:
        self.looking, self.fresh = False, False
        self.clock_s += max(seconds, LOOK_S)
        # Over the cap one rank watches, and another takes its place a look later: as often as there are ranks.
        if self.clock_s > max(self.started_s + self.scenario.cap_s, self.spoke_s) + (2 + self.scenario.size) * LOOK_S:
            raise Violation("a rank waits past its cap")

    def _body(self) -> None:
        here.rank = self
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

    def __init__(self, thread: RankThread) -> None:
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
        version = scenario.renewed if self._thread.life else scenario.versions.get(index, "this")
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
        where = (tuned.group._member.attachment, tuned.group._pass, bool(self._thread.life) and self._scenario.renewed != "this")
        self._thread.log.append(Ended(call, name, tuple(culprits), str(error or ""), tuned.epoch.digest, runs, where))

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
        here.rank.ask("set", key, value.encode() if isinstance(value, str) else value)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(here.rank.ask("get", tuple(keys)))

    def get(self, key: str) -> bytes:
        value: bytes = here.rank.ask("get", (key,))[0]
        return value

    def check(self, keys: Sequence[str]) -> bool:
        there: bool = here.rank.ask("check", tuple(keys))
        return there

    def add(self, key: str, amount: int) -> int:
        total: int = here.rank.ask("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        settled: bytes = here.rank.ask("settle", key, expected.encode(), desired.encode())
        return settled

    def delete_key(self, key: str) -> bool:
        was_there: bool = here.rank.ask("delete", key)
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
        found = here.rank.ask("find", tuple(self._prefix + key for key in wanted))
        return {key: value for key, value in zip(wanted, found, strict=True) if value is not None}

    def put(self, key: str, value: bytes) -> bool:
        here.rank.ask("set", self._prefix + key, value)
        return True

    def delete(self, key: str) -> None:
        here.rank.ask("delete", self._prefix + key)

    def list(self, prefix: str) -> list[str]:
        return [key.removeprefix(self._prefix) for key in here.rank.ask("list", f"{self._prefix}{prefix}/")]

    def close(self) -> None:
        pass


class Requests:
    def call(self, request: Callable[[], Any], timeout_s: float) -> Any:
        return request()

    def close(self) -> None:
        pass


class Measurer:
    """Times by what the operation says, at once."""

    def __init__(self, operation: FakeOperation, cell: Any, policy: Any, spec: Any, *, progress: Callable[[], None], **other: Any) -> None:
        self._operation, self._progress = operation, progress

    def prepare(self, tactics: Sequence[Tactic]) -> None:
        self._progress()
        if self._operation.probe_fault == "raise":
            raise KeyError("calibration file")
        if self._operation.probe_fault == "crawl":
            rank = here.rank
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


class ExploredRace(Race):
    """A rank that deviates lets the default win."""

    def winner(self) -> Standing | None:
        deviates = here.rank.index == here.rank.scenario.deviates
        return self.standing(self.default) if deviates else super().winner()


class FakePath:
    """A name in the shared memory of a host."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __truediv__(self, name: str) -> FakePath:
        return FakePath(name)

    def __str__(self) -> str:
        return f"shm/{self._name}"

    def unlink(self, missing_ok: bool) -> None:
        here.rank.ask("delete", str(self))


def make_memory(path: FakePath, nbytes: int) -> None:
    here.rank.ask("set", str(path), b"arena")


def open_memory(path: FakePath, group: RankGroup, nbytes: int) -> Any:
    if here.rank.ask("find", (str(path),))[0] is None:
        raise FileNotFoundError(f"there is no {path}")  # as after a peer has left
    return SimpleNamespace(nbytes=nbytes, failed=None, leave=lambda: None)


def stored(costs: Sequence[str] = ("plain", "quick")) -> dict[str, bytes]:
    """The entries that a pass over the operation leaves: one that finds them hits, and so has fewer steps. And its epoch."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as monkeypatch, tuner.Tuner(store=store, **SETTINGS) as before:
        monkeypatch.setattr(rounds, "CellMeasurer", Measurer)  # a loaded machine must not choose another winner
        before.record(FakeOperation("explored", {name: 10.0 * (2 - at) for at, name in enumerate(costs)}))
        before.run_pass()
        assert {str(winner.tactic["name"]) for winner in before.epoch.winners.values()} == {costs[-1]}
    return {key: store.get(key) or b"" for key in store.list("")}
