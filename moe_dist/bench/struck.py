"""A rank of the fault matrix, and what happens on it: the culprit meets its fault, its peers go the same way without one.

Beside tactics that run alone the pool has finalize + all-reduce, by gloo and by shared memory, so that a divergence would hang; after
the fault it is called once. A fault is the real thing: a disk that is full, an allocation that finds no room, words that were said
before. `faults.py` starts these, and stops or kills from outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_dist.allreduce import GLOO, ONE_SHOT, FinalizeAllReduce, Runner, ServedAllReduce
from moe_dist.bench.fault_list import (
    AGREED,
    BY_GLOO,
    DEADLINE_S,
    DEPLOYMENT,
    EPOCH,
    KEPT,
    MEET,
    PROGRESS_TIMEOUT_S,
    PUBLISH,
    RUN,
    TIMED,
    UNTUNED,
    Fault,
)
from moe_dist.bench.ranks import Rank, wait_for
from moe_dist.bench.scarcity import BEYOND_BYTES, exhaust_memory, fill_disk, limit_memory, mount_small_disk
from moe_dist.bench.simulated import SimulatedOperation, SimulatedProbe
from moe_dist.distributed.epoch import EPOCHS, published
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused
from moe_dist.errors import GroupError, TunerStateError, TuningError
from moe_dist.stores.base import Store
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.redis import RedisStore
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, ProbeSpec, Tactic
from moe_dist.tuning.tuner import PassReport, Tuner

PATIENCE_S = 2.0  # of a collective call
SMALL_DISK_BYTES = 512 << 10
SMALL_FILE_BYTES = 8 << 10  # what a rank says of itself fits, an arena of three ranks does not
COSTS: dict[str, float | str] = {"plain": 4000.0, "quick": 500.0, "slow": 9000.0}
POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
LADDER = BucketLadder((1,))


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
        return BY_GLOO
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


def serves(rank: int) -> str:
    """The mark of a rank that has adopted the epoch to serve from, before anything strikes."""
    return f"serves-{rank}"


def adopts(rank: int) -> str:
    """The mark of a rank that is about to do so."""
    return f"adopts-{rank}"


def struck_rank(rank: Rank, fault: Fault | None, strategy: str, url: str) -> dict[str, Any]:
    """Without a fault: tune the problems "base", and leave. With one: adopt that epoch, meet the fault in a second pass or a reload,
    and make a collective call by what is served then. Where one is started again alone, all then meet in a pass of new tuners."""
    if fault is None or not fault.starts_again:
        return _serve(rank, fault, strategy, url)
    if rank.index == fault.culprit and (rank.folder / "mark-struck").exists():
        return _meet_again(rank, strategy, url, version="another" if "another release" in fault.name else None)
    try:
        return _serve(rank, fault, strategy, url)
    except GroupError as error:
        (rank.folder / f"told-{rank.index}").write_text(f"{type(error).__name__}({', '.join(map(str, error.ranks))})")
        (rank.folder / f"stored-{rank.index}").write_text(published(FilesystemStore(url), DEPLOYMENT)[0].table)
    return _meet_again(rank, strategy, url)


def _meet_again(rank: Rank, strategy: str, url: str, version: str | None = None) -> dict[str, Any]:
    """A pass of the rank that was started again alone and its peers, over what needs no process group: torch's takes no rank back."""
    group = rank.group(progress_timeout=DEADLINE_S / 2, cap=DEADLINE_S, version=version)
    with _tuner(FilesystemStore(url), group, strategy) as tuner:
        for name in ("base", "new"):
            tuner.record(_operation(name, COSTS))
        ending = _ending(tuner.run_pass())
        return {"digest": tuner.epoch.digest, "ending": ending}


def _tuner(store: Store, group: RankGroup, strategy: str) -> Tuner:
    settings: dict[str, Any] = {"policy": POLICY, "ladder": LADDER, "deployment": DEPLOYMENT, "device": "cpu", "versions": {"foreign": "1"}}
    return Tuner(store=store, group=group, strategy=strategy, **settings)


def _ending(report: PassReport) -> str:
    return UNTUNED if any(row.winner is None for row in report.rows) else AGREED


def _serve(rank: Rank, fault: Fault | None, strategy: str, url: str) -> dict[str, Any]:
    store = _store_of(rank, fault, url)  # before torch starts threads
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    patience = timedelta(seconds=fault.patience_s if fault else PROGRESS_TIMEOUT_S)
    cap = max(timedelta(seconds=DEADLINE_S), patience)
    group = _StruckGroup(client, rank.index, rank.size, progress_timeout=patience, cap=cap)
    group.strike = lambda step: None
    dist.init_process_group("gloo", store=client, rank=rank.index, world_size=rank.size)
    with _tuner(store, group, strategy) as tuner:
        base, new = _reduction(8), _reduction(64)  # of more symmetric memory than is held
        objections: dict[str, str] = {}
        tuner.record(_operation("base", COSTS, objections=objections))
        tuner.record(base)
        if fault is None:
            report = tuner.run_pass()
            if (called := _call(rank, tuner, base)) == BY_GLOO:
                return {"digest": tuner.epoch.digest, "ending": BY_GLOO}
            if called != "served":
                raise RuntimeError(f"without a fault a collective call was {called}")
            return {"digest": tuner.epoch.digest, "ending": _ending(report)}
        rank.mark(adopts(rank.index))
        with remembered(group) as said:
            if not tuner.reload():  # what is served while the fault strikes
                raise AssertionError("there was no epoch to serve")
        rank.mark(serves(rank.index))
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
                    _meet(fault, rank, tuner, client, Path(url), said)

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
                ending = _ending(tuner.run_pass())
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


@contextlib.contextmanager
def remembered(group: RankGroup) -> Iterator[dict[str, Any]]:
    """What this rank says in the block, by key, but for how far it is."""
    rendezvous, said = group._rendezvous, dict[str, Any]()
    say = rendezvous.set

    def remember(key: str, value: Any) -> None:
        if "/progress/" not in key:
            said[key] = value
        say(key, value)

    rendezvous.set = remember  # type: ignore[method-assign]
    try:
        yield said
    finally:
        rendezvous.set = say  # type: ignore[method-assign]


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


def _meet(fault: Fault, rank: Rank, tuner: Tuner, client: TCPStore, store: Path, said: Mapping[str, Any]) -> None:
    """Faults that strike at a step. said: the words of this rank in a pass that is over, by their keys."""
    match fault.name:
        case "killed" | "killed in a collective" | "restarted alone" | "restarted alone with another release":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leader killed" | "leader killed after its word" | "leader killed after the commit":
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
            for key, value in said.items():
                client.set(key, value)
            client.compare_set(f"{tuner.group._base}/1/verdict", "", "late")  # pass 1 is over
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


def other_job(rank: Rank, url: str, marks: Path) -> None:
    """Another job on the same store, whose epoch holds what the ranks serve, and a winner of its own for what they tune."""
    with Tuner(store=url, policy=POLICY, ladder=LADDER, deployment=DEPLOYMENT, device="cpu", versions={"foreign": "1"}) as tuner:
        tuner.record(SimulatedOperation("base", COSTS))
        tuner.record(SimulatedOperation("new", {**COSTS, "plain": 100.0}))
        tuner.record(SimulatedOperation("other job", COSTS))
        rank.mark("ready")
        wait_for(marks / "mark-struck", 120.0)
        tuner.run_pass()
    (marks / "mark-continued").touch()
