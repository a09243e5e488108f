"""What happens to a group when something goes wrong on one rank: every fault in every phase, over real processes.

Owns the fault matrix. Three ranks serve a committed epoch, one of them (the culprit) meets a fault, and the rest is watched:
all survivors must end with one table, or with one error that names the culprit, within the deadline, with the previous epoch
intact; started again without the fault, the group must agree. Beside tactics that run alone the pool has finalize + all-reduce,
by gloo and by shared memory, so that a divergence would hang; after the fault it is called once. A fault is the real thing: a
server that is killed, a disk that is full, an allocation that finds no room, another job's process. cli and tests import this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_dist.allreduce import GLOO, ONE_SHOT, FinalizeAllReduce, Runner, ServedAllReduce
from moe_dist.bench.ranks import Outcome, Rank, RankHangs, Ranks, run_ranks, wait_for
from moe_dist.bench.scarcity import BEYOND_BYTES, exhaust_memory, fill_disk, limit_memory, mount_small_disk, why_no_small_disk
from moe_dist.bench.server import RedisServer, find_binary
from moe_dist.bench.simulated import SimulatedOperation, SimulatedProbe
from moe_dist.distributed.epoch import EPOCHS, published
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused
from moe_dist.errors import GroupError, TunerStateError, TuningError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisStore
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, ProbeSpec, Tactic
from moe_dist.tuning.tuner import Tuner

RANKS = 3
PROGRESS_TIMEOUT_S = 4.0  # a silent rank is lost after this
DEADLINE_S = 30.0  # the cap of a pass: nobody may wait longer
PATIENCE_S = 2.0  # of a collective call
ROWS_AT_ONCE = 2  # most of their time the ranks of a row wait
SMALL_DISK_BYTES = 512 << 10
SMALL_FILE_BYTES = 8 << 10  # what a rank says of itself fits, an arena of three ranks does not
DEPLOYMENT = "faults"
COSTS: dict[str, float | str] = {"plain": 4000.0, "quick": 500.0, "slow": 9000.0}
POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
LADDER = BucketLadder((1,))

TIMED = "timed"  # a word with times, whatever the strategy calls its step
RUN = "run"  # no step: in the middle of a tactic that is being timed
MEET = "meet"  # the same of a collective one
PUBLISH = "publish"  # no step: the leader's part after the commit
EPOCH = "epoch"  # no step: the leader has published the entries, and is about to publish the epoch

AGREED = "agreed"
UNTUNED = "agreed, untuned"  # no candidate was timed on all ranks, so all run the default
KEPT = "agreed, not reloaded"  # all keep the epoch that they serve


@dataclasses.dataclass(frozen=True)
class Fault:
    """phase: where it strikes. outcome: what all survivors must end with; errors are written `Type(culprit, ...)`.

    culprit: the rank it strikes. at: the step whose word the culprit is about to send when the fault strikes; "": it lies in
    what the culprit was started with. gone: the culprit ends otherwise than the survivors do. deaths: earlier starts with the same fault.
    """

    phase: str
    name: str
    outcome: str
    culprit: int = 1
    at: str = ""
    gone: bool = False
    deaths: int = 0

    @property
    def on_server(self) -> bool:
        """The store is a server that is killed."""
        return self.name.startswith("store killed")

    @property
    def on_small_disk(self) -> bool:
        """The culprit's store lies on a disk of its own, which is full when it strikes."""
        return "disk full" in self.name

    @property
    def collective(self) -> str:
        """What a collective call comes to after it: in a dead group it is refused, and nobody waits for who is gone."""
        if self.outcome.startswith(("RankLost", "RankWithdrawn")):
            return "refused"
        return f"RankLost({self.culprit})" if self.gone else "served"


STEPS = {"agree": "agree-2", "measure": TIMED, "commit": "decide", "reload": "reload-accept"}


def _faults() -> tuple[Fault, ...]:
    everywhere = []
    for phase, at in STEPS.items():
        everywhere += [
            Fault(phase, "killed", "RankLost(1)", 1, at, gone=True),
            Fault(phase, "leader killed", "RankLost(0)", 0, at, gone=True),
            Fault(phase, "stopped", "RankLost(1)", 1, at, gone=True),
            Fault(phase, "stopped and continued", AGREED, 1, at),
            Fault(phase, "stopped, lost, then continued", "RankLost(1)", 1, at),
            Fault(phase, "late", AGREED, 1, at),
            Fault(phase, "leaves by an exception", "RankWithdrawn(1)", 1, at, gone=True),
            Fault(phase, "out of memory", "RankWithdrawn(1)", 1, at, gone=True),
            Fault(phase, "disk full", AGREED, 1, at),
            Fault(phase, "leader's disk full", AGREED, 0, at),
            # In a reload before the leader has read the epoch.
            Fault(phase, "store killed", *((KEPT, 1, "reload-problems") if phase == "reload" else (AGREED, 1, at))),
            Fault(phase, "another job publishes in between", AGREED, 1, at),
            Fault(phase, "two contexts at once", AGREED, 1, at),
            Fault(phase, "two passes at once", AGREED, 1, at),
            Fault(phase, "a pass within a pass", "RankWithdrawn(1)", 1, at, gone=True),
            Fault(phase, "late words of an old pass", AGREED, 1, at),
        ]
    return (
        *everywhere,
        Fault("agree", "other software version", "SettingsDiffer(1)"),
        Fault("agree", "other GPU name", "SettingsDiffer(1)"),
        Fault("agree", "other candidates", AGREED),
        Fault("agree", "two tuners on one group", "TunerStateError()"),
        Fault("measure", "out of memory in one tactic", AGREED),
        Fault("measure", "out of memory while a tactic runs", AGREED, 1, RUN),
        Fault("measure", "out of memory for the probe", UNTUNED),
        Fault("measure", "raises in one tactic", AGREED),
        Fault("measure", "raises in all tactics", UNTUNED),
        Fault("measure", "ends the process", "RankLost(1)", 1, RUN, gone=True),
        Fault("measure", "ended the process twice before", AGREED, 1, RUN, deaths=2),
        Fault("measure", "killed for its memory", "RankLost(1)", 1, RUN, gone=True),
        Fault("measure", "killed for its memory twice before", AGREED, 1, RUN, deaths=2),
        Fault("measure", "slow but alive", AGREED),
        Fault("measure", "killed in a collective", "RankLost(1)", 1, MEET, gone=True),
        Fault("measure", "stopped in a collective", "RankLost(1)", 1, MEET, gone=True),
        Fault("measure", "late in a collective", AGREED, 1, MEET),
        Fault("measure", "raises in a collective", AGREED, 1, MEET),
        Fault("measure", "out of memory in a collective", AGREED, 1, MEET),
        Fault("commit", "no room for symmetric memory", "PassAborted(0)", 0, "reserve-bytes"),
        Fault("commit", "leader killed after its word", "RankLost(0)", 0, "commit", gone=True),
        Fault("commit", "leader killed after the commit", AGREED, 0, PUBLISH, gone=True),
        Fault("commit", "store killed before the epoch", AGREED, 0, EPOCH),
        Fault("reload", "other software version", KEPT),
        Fault("reload", "other GPU name", KEPT),
        Fault("reload", "other candidates", KEPT),
        Fault("reload", "store not shared", AGREED),
    )


FAULTS = _faults()


def fault_table(
    faults: Iterable[Fault] = FAULTS, strategies: Sequence[str] = STRATEGIES, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of phase, fault, strategy, outcome, collective, seconds, deadline_seconds, expected, previous_epoch, restart; one a pair.

    seconds: from the fault to the end of the last survivor. outcome "hang": a survivor outlasted the deadline; "not made": why a fault
    could not be. ConfigError: there is no server to kill.
    """
    find_binary()
    no_disk = why_no_small_disk()
    rows = []
    with tempfile.TemporaryDirectory(prefix="moe-dist-faults-") as name, ThreadPoolExecutor(ROWS_AT_ONCE) as pool:
        root = Path(name)
        for strategy in strategies:
            _serve_first(root / strategy, str(root / strategy / "store"), strategy)
        pairs = list(itertools.product(faults, strategies))

        def row(number: int) -> dict[str, Any]:
            fault, strategy = pairs[number]
            if fault.on_small_disk and no_disk is not None:
                return _not_made(fault, strategy, f"no small disk can be mounted here: {no_disk}")
            return _row(fault, strategy, root / strategy / "store", root / f"row-{number}")

        for made in pool.map(row, range(len(pairs))):
            rows.append(made)
            note(", ".join(f"{name} {value}" for name, value in made.items()))
    return rows


def _not_made(fault: Fault, strategy: str, why: str) -> dict[str, Any]:
    row: dict[str, Any] = {"phase": fault.phase, "fault": fault.name, "strategy": strategy, "outcome": f"not made: {why}", "collective": ""}
    row |= {"seconds": 0.0, "deadline_seconds": DEADLINE_S, "expected": fault.outcome}
    return row | {"previous_epoch": "unknown", "restart": "not made"}


def _serve_first(folder: Path, url: str, strategy: str) -> None:
    """The epoch that is served when a fault strikes, into the store at `url`."""
    ended = run_ranks(_rank, RANKS, folder, None, strategy, url, deadline=60.0)
    if (first := _outcome(ended)) != AGREED:
        raise RuntimeError(f"without a fault the ranks ended {first} under {strategy}: {ended}")


def _row(fault: Fault, strategy: str, served: Path, folder: Path) -> dict[str, Any]:
    """served: a store that holds the epoch to serve from; folder: for this row alone."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(durable=True)) if fault.on_server else None
        url = f"unix://{server.socket}" if server else str(folder / "store")
        if server:
            _serve_first(folder, url, strategy)
        else:
            shutil.copytree(served, folder / "store")
        before = published(_opened(stack, url), DEPLOYMENT)[0].table
        if fault.name == "another job publishes in between":
            stack.enter_context(Ranks(_other_job, 1, folder / "job", url, folder)).wait("ready")
        row: dict[str, Any] = {"phase": fault.phase, "fault": fault.name, "strategy": strategy}
        for _ in range(fault.deaths):
            with Ranks(_rank, RANKS, folder, fault, strategy, url) as ranks:
                ranks.wait("struck")
                ranks.kill(fault.culprit)
                ranks.join(60.0)
        intact = True
        with Ranks(_rank, RANKS, folder, fault, strategy, url) as ranks:
            struck = time.monotonic()
            try:
                if fault.at and not fault.deaths:
                    ranks.wait("struck")
                    struck = time.monotonic()
                    _meet_from_outside(fault, ranks, server)
                survivors = [rank for rank in range(RANKS) if not (fault.gone and rank == fault.culprit)]
                ended = [ranks.join_one(rank, DEADLINE_S + 10.0 - (time.monotonic() - struck)) for rank in survivors]
                row |= {"outcome": _outcome(ended), "collective": _collective(folder, survivors)}
                row["seconds"] = round(time.monotonic() - struck, 2)
                if server:
                    server.start()
                intact = _intact(fault, folder, ended, published(_opened(stack, url), DEPLOYMENT)[0].table, before)
            except RankHangs:
                row |= {"outcome": "hang", "collective": "", "seconds": round(time.monotonic() - struck, 2)}
        again = run_ranks(_rank, RANKS, folder, None, strategy, url, deadline=60.0)
        row |= {"deadline_seconds": DEADLINE_S, "expected": fault.outcome}
        return row | {"previous_epoch": "intact" if intact else "damaged", "restart": _outcome(again)}


def _opened(stack: contextlib.ExitStack, url: str) -> Store:
    return stack.enter_context(contextlib.closing(open_store(url)))


def _meet_from_outside(fault: Fault, ranks: Ranks, server: RedisServer | None) -> None:
    """What happens to the culprit, or to the store, while the culprit stands where it was struck."""
    if fault.name.startswith("stopped"):
        ranks.signal(fault.culprit, signal.SIGSTOP)
        if fault.name.endswith("continued"):
            time.sleep(PROGRESS_TIMEOUT_S / 4)
            if "lost" in fault.name:
                ranks.join_one(0, DEADLINE_S)
            ranks.signal(fault.culprit, signal.SIGCONT)
    elif fault.name == "killed for its memory":
        ranks.kill(fault.culprit)
    elif fault.name == "another job publishes in between":
        return  # it says itself when it is done
    elif server:
        server.stop()
    (ranks.folder / "mark-continued").touch()


def _outcome(ended: Sequence[Outcome]) -> str:
    """What all of `ended` share, or what each said."""
    said = []
    for outcome in ended:
        if outcome.error:
            said.append(f"{outcome.error}({', '.join(map(str, outcome.culprits))})")
        else:
            said.append(outcome.value["ending"])
    tables = {outcome.value["digest"] for outcome in ended if not outcome.error}
    if len(set(said)) > 1 or len(tables) > 1:
        return "differ: " + "; ".join(said)
    return said[0]


def _collective(folder: Path, ranks: Sequence[int]) -> str:
    """What the survivors' collective calls came to; those that left by an exception of their own made none."""
    called = [path.read_text() for rank in ranks if (path := folder / f"collective-{rank}").exists()]
    return "; ".join(sorted(set(called)))


def _intact(fault: Fault, folder: Path, ended: Sequence[Outcome], stored: str, before: str) -> bool:
    """After an error, or with a store that died, it holds nothing newer than the epoch that was committed before; after an error
    everyone still serves that."""
    failed = any(outcome.error for outcome in ended)
    kept = [path.read_text() for path in folder.glob("served-*")]
    served = not failed or (bool(kept) and all(text == before for text in kept))
    return served and (stored == before or not (failed or fault.on_server))


# -- on a rank ---------------------------------------------------------------------------------------------------------------


class _StruckGroup(RankGroup):
    """A group whose culprit meets its fault just before it sends the word of a step."""

    strike: Callable[[str], None]

    def _meet(self, step: str, said: bytes, conclude: Callable[[list[bytes]], bytes]) -> bytes:
        self.strike(TIMED if step.startswith(("measure-", "shard-", "reload-published")) else step)
        return super()._meet(step, said, conclude)

    def commit(self, table_digest: str) -> None:
        self.strike("commit")
        super().commit(table_digest)
        self.strike(PUBLISH)


class _Reduction(FinalizeAllReduce):
    """Its gloo tactic takes 60 ms longer, so that one of shared memory wins, on a busy machine too. strike: called amid ONE_SHOT's runs."""

    strike: Callable[[str], None]

    def bind(self, tactic: Tactic, num_tokens: int, arena: Arena | Refused | None) -> Runner:
        inner, runs = super().bind(tactic, num_tokens, arena), 0

        def run(rows: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal runs
            runs += 1
            if tactic == GLOO:
                time.sleep(0.06)
            if tactic == ONE_SHOT and runs == 3:
                self.strike(MEET)
            inner(rows, out)

        return run


def _reduction(hidden_size: int) -> _Reduction:
    made = _Reduction(hidden_size=hidden_size, slots=2, dtype="fp32", group=dist.group.WORLD, patience=timedelta(seconds=PATIENCE_S))
    made.strike = lambda step: None
    return made


def _call(rank: Rank, tuner: Tuner, operation: _Reduction) -> str:
    """One collective call by the epoch in force."""
    served = ServedAllReduce(operation, tuner)
    if served.lookup(1) == GLOO:
        return "served by gloo"
    out = torch.full((1, operation.hidden_size), torch.nan)
    try:
        served(torch.full((1, 2, operation.hidden_size), 1.0 + rank.index), group_tokens=1, out=out)
    except GroupError as error:
        return f"{type(error).__name__}({', '.join(map(str, error.ranks))})"
    except TuningError:
        return "refused"
    return "served" if out.eq(2.0 * sum(range(1, rank.size + 1))).all() else "served wrongly"


class _Operation(SimulatedOperation):
    """strike: called amid the runs of "quick". needs: how much memory a part of it takes, by the part's name."""

    strike: Callable[[str], None]
    needs: dict[str, int]

    def probe(self, num_tokens: int, spec: ProbeSpec) -> SimulatedProbe:
        torch.empty(self.needs.get("probe", 0), dtype=torch.uint8)
        return _Probe(self)


class _Probe(SimulatedProbe):
    operation: _Operation

    def bind(self, wanted: Tactic) -> Callable[[int], Tactic]:
        inner, runs = super().bind(wanted), 0
        if wanted["name"] != "quick":
            return inner
        torch.empty(self.operation.needs.get("quick", 0), dtype=torch.uint8)

        def run(index: int) -> Tactic:
            nonlocal runs
            runs += 1
            if runs == 3:
                self.operation.strike(RUN)
            return inner(index)

        return run


def _operation(name: str, costs: dict[str, float | str], **settings: Any) -> _Operation:
    made = _Operation(name, costs, **settings)
    made.strike, made.needs = lambda step: None, {}
    return made


class _StruckServer(RedisStore):
    """A store whose rank meets its fault when it is about to publish an epoch."""

    strike: Callable[[str], None]

    def _write(self, key: str, value: bytes) -> None:
        if key.startswith(f"{EPOCHS}/"):
            self.strike(EPOCH)
        super()._write(key, value)


def _store_of(rank: Rank, fault: Fault | None, url: str) -> Store:
    if url.startswith("unix:"):
        server = _StruckServer.from_url(url)
        assert isinstance(server, _StruckServer)
        server.strike = lambda step: None
        return server
    folder = Path(url)
    if fault is not None and rank.index == fault.culprit:
        if fault.name == "store not shared":
            folder = rank.folder / "elsewhere"
        elif fault.on_small_disk:
            mount_small_disk(folder, SMALL_DISK_BYTES)
    return FilesystemStore(folder)


def _rank(rank: Rank, fault: Fault | None, strategy: str, url: str) -> dict[str, Any]:
    """Without a fault: tune the problems "base", and leave. With one: adopt that epoch, meet the fault in a second pass or a reload,
    and make a collective call by what is served then."""
    store = _store_of(rank, fault, url)  # before torch starts threads
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    group = _StruckGroup(
        client, rank.index, rank.size, progress_timeout=timedelta(seconds=PROGRESS_TIMEOUT_S), cap=timedelta(seconds=DEADLINE_S)
    )
    group.strike = lambda step: None
    dist.init_process_group("gloo", store=client, rank=rank.index, world_size=rank.size)
    with Tuner(store=store, group=group, strategy=strategy, policy=POLICY, ladder=LADDER, deployment=DEPLOYMENT, device="cpu",
               versions={"foreign": "1"}) as tuner:  # fmt: skip
        base, new = _reduction(8), _reduction(64)  # of more symmetric memory than is held
        objections: dict[str, str] = {}
        tuner.record(_operation("base", COSTS, objections=objections))
        tuner.record(base)
        if fault is None:
            report = tuner.run_pass()
            if (called := _call(rank, tuner, base)) != "served":
                raise RuntimeError(f"without a fault a collective call was {called}")
            return {"digest": tuner.epoch.digest, "ending": UNTUNED if any(row.winner is None for row in report.rows) else AGREED}
        tuner.reload()  # what is served while the fault strikes
        (rank.folder / f"served-{rank.index}").write_text(tuner.epoch.digest)
        costs = dict(COSTS)
        operation = _operation("new", costs)
        if rank.index == fault.culprit:
            _prepare(fault, tuner, operation, costs, objections)
            struck: list[str] = []

            def strike(step: str) -> None:
                if step == fault.at and not struck:
                    struck.append(step)
                    rank.mark("struck")
                    _meet(fault, rank, tuner, client, Path(url))

            group.strike = new.strike = operation.strike = strike
            if isinstance(store, _StruckServer):
                store.strike = strike
        tuner.record(operation)
        tuner.record(new)
        called = ""
        try:
            if fault.name == "two tuners on one group":
                rank.group().close()  # refused: this rank has an open one
            if fault.phase == "reload":
                ending = AGREED if tuner.reload() else KEPT
            else:
                ending = UNTUNED if any(row.winner is None for row in tuner.run_pass().rows) else AGREED
            called = _call(rank, tuner, base if fault.phase == "reload" else new)
        except TuningError:
            called = _call(rank, tuner, base)
            raise
        finally:
            (rank.folder / f"served-{rank.index}").write_text(tuner.epoch.digest)
            (rank.folder / f"collective-{rank.index}").write_text(called)
        if fault.on_small_disk and rank.index == fault.culprit and fill_disk(Path(url)):
            raise AssertionError("the disk had room again")
        return {"digest": tuner.epoch.digest, "ending": ending}


def _prepare(fault: Fault, tuner: Tuner, operation: _Operation, costs: dict[str, float | str], objections: dict[str, str]) -> None:
    """Faults that lie in what the culprit has. costs: of `operation`; objections: against what is served."""
    match fault.name:
        case "other software version":
            tuner.environment = dataclasses.replace(tuner.environment, backends=(("foreign", "2"),))
        case "other GPU name":
            tuner.environment = dataclasses.replace(tuner.environment, device_name="another")
        case "other candidates":
            costs["only here"] = 1.0
            if fault.phase == "reload":
                objections["quick"] = "gone since the update"
        case "out of memory in one tactic":
            operation.needs["quick"] = BEYOND_BYTES
            limit_memory()
        case "out of memory for the probe":
            operation.needs["probe"] = BEYOND_BYTES
            limit_memory()
        case "raises in one tactic":
            costs["quick"] = "raise"
        case "raises in all tactics":
            costs.update(dict.fromkeys(costs, "raise"))
        case "slow but alive":
            costs.update({name: 120.0 * float(cost) for name, cost in COSTS.items()})


def _meet(fault: Fault, rank: Rank, tuner: Tuner, client: TCPStore, store: Path) -> None:
    """Faults that strike at a step."""
    match fault.name:
        case "killed" | "killed in a collective" | "leader killed" | "leader killed after its word" | "leader killed after the commit":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ends the process" | "ended the process twice before":
            os._exit(9)
        case "stopped" | "stopped in a collective" | "killed for its memory" | "killed for its memory twice before":
            time.sleep(3600)  # the signal comes from outside, in the middle of this
        case "late":
            time.sleep(PROGRESS_TIMEOUT_S / 2)
        case "late in a collective":
            time.sleep(PATIENCE_S + 1)
        case "raises in a collective":
            raise ValueError("the device reports an error flag")
        case "leaves by an exception":
            raise KeyError("calibration file")
        case "out of memory" | "out of memory while a tactic runs" | "out of memory in a collective":
            exhaust_memory()
        case "disk full" | "leader's disk full":
            fill_disk(store)
        case "no room for symmetric memory":
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        case "late words of an old pass":
            for number, last in itertools.product(range(1, 9), ("0", "1", "all", "bytes/0", "bytes/1")):
                client.set(f"{tuner.group._base}/1/{number:06d}/{last}", "late")  # pass 1 is over
            client.compare_set(f"{tuner.group._base}/1/verdict", "", "late")
        case "two contexts at once":
            _is_refused(lambda: rank.group().close())
        case "two passes at once":
            _is_refused(tuner.run_pass)
        case "a pass within a pass":
            tuner.run_pass()
        case _:
            rank.wait("continued")


def _is_refused(action: Callable[[], object]) -> None:
    """AssertionError: another thread could do it while this one is in a pass."""
    raised: list[str] = []

    def attempt() -> None:
        try:
            action()
        except TunerStateError as error:
            raised.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert raised, "two at once were not refused"


def _other_job(rank: Rank, url: str, marks: Path) -> None:
    """Another job on the same store, whose epoch holds what the ranks serve, and a winner of its own for what they tune."""
    with Tuner(store=url, policy=POLICY, ladder=LADDER, deployment=DEPLOYMENT, device="cpu", versions={"foreign": "1"}) as tuner:
        tuner.record(SimulatedOperation("base", COSTS))
        tuner.record(SimulatedOperation("new", {**COSTS, "plain": 100.0}))
        tuner.record(SimulatedOperation("other job", COSTS))
        rank.mark("ready")
        wait_for(marks / "mark-struck", 120.0)
        tuner.run_pass()
    (marks / "mark-continued").touch()
