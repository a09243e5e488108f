"""What happens to a group when something goes wrong on one rank: every fault in every phase, over real processes.

Owns the fault matrix. Three ranks serve a committed epoch, one of them (the culprit) meets a fault, and the rest is watched:
all survivors must end with one table, or with one error that names the culprit, within the deadline, with the previous epoch
intact; started again without the fault, the group must agree. Beside tactics that run alone the pool has finalize + all-reduce,
by gloo and by shared memory, so that a divergence would hang; after the fault it is called once. cli and tests import this.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_dist.allreduce import GLOO, ONE_SHOT, FinalizeAllReduce, Runner, ServedAllReduce
from moe_dist.bench.ranks import Outcome, Rank, RankHangs, Ranks, run_ranks
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.distributed.epoch import published
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused
from moe_dist.errors import GroupError, TuningError
from moe_dist.stores.degrade import Unavailable
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, Tactic
from moe_dist.tuning.tuner import Tuner

RANKS = 3
PROGRESS_TIMEOUT_S = 4.0  # a silent rank is lost after this
DEADLINE_S = 30.0  # the cap of a pass: nobody may wait longer
PATIENCE_S = 2.0  # of a collective call
DEPLOYMENT = "faults"
COSTS: dict[str, float | str] = {"plain": 4000.0, "quick": 500.0, "slow": 9000.0}
POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
LADDER = BucketLadder((1,))

TIMED = "timed"  # a word with times, whatever the strategy calls its step
MEET = "meet"  # no step: in the middle of a collective tactic that is being timed
PUBLISH = "publish"  # no step: the leader's part after the commit

AGREED, UNTUNED = "agreed", "agreed, untuned"  # untuned: no candidate was timed on all ranks, so all run the default


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
        ]
    return (
        *everywhere,
        Fault("agree", "other software version", "SettingsDiffer(1)"),
        Fault("agree", "other GPU name", "SettingsDiffer(1)"),
        Fault("agree", "other candidates", AGREED),
        Fault("agree", "late words of an old pass", AGREED, 1, STEPS["agree"]),
        Fault("agree", "two tuners on one group", "TunerStateError()"),
        Fault("agree", "two passes at once", "RankWithdrawn(1)", 1, STEPS["agree"], gone=True),
        Fault("measure", "out of memory in one tactic", AGREED),
        Fault("measure", "out of memory for the probe", UNTUNED),
        Fault("measure", "raises in one tactic", AGREED),
        Fault("measure", "raises in all tactics", UNTUNED),
        Fault("measure", "ends the process", "RankLost(1)", gone=True),
        Fault("measure", "ended the process twice before", AGREED, deaths=2),
        Fault("measure", "slow but alive", AGREED),
        Fault("measure", "full disk", AGREED, 0),
        Fault("measure", "killed in a collective", "RankLost(1)", 1, MEET, gone=True),
        Fault("measure", "stopped in a collective", "RankLost(1)", 1, MEET, gone=True),
        Fault("measure", "late in a collective", AGREED, 1, MEET),
        Fault("measure", "raises in a collective", AGREED, 1, MEET),
        Fault("commit", "leader killed after its word", "RankLost(0)", 0, "commit", gone=True),
        Fault("commit", "leader killed after the commit", AGREED, 0, PUBLISH, gone=True),
        Fault("commit", "store lost before the epoch", AGREED, 0),
        Fault("reload", "another job publishes in between", AGREED, 1, STEPS["reload"]),
        Fault("reload", "store not shared", AGREED),
    )


FAULTS = _faults()


def fault_table(
    faults: Iterable[Fault] = FAULTS, strategies: Sequence[str] = STRATEGIES, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of phase, fault, strategy, outcome, collective, seconds, deadline_seconds, expected, previous_epoch, restart; one a pair.

    seconds: from the fault to the end of the last survivor. outcome "hang": a survivor outlasted the deadline.
    """
    rows = []
    for fault in faults:
        for strategy in strategies:
            with tempfile.TemporaryDirectory(prefix="moe-dist-faults-") as folder:
                rows.append(_row(fault, strategy, Path(folder)))
            note(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return rows


def _row(fault: Fault, strategy: str, folder: Path) -> dict[str, Any]:
    before = run_ranks(_rank, RANKS, folder, None, strategy, deadline=60.0)
    if (first := _outcome(before)) != AGREED:
        raise RuntimeError(f"{fault.name} in {fault.phase} under {strategy}: without a fault the ranks ended {first}: {before}")
    intact = True
    row: dict[str, Any] = {"phase": fault.phase, "fault": fault.name, "strategy": strategy}
    for called in folder.glob("collective-*"):
        called.unlink()
    for _ in range(fault.deaths):
        run_ranks(_rank, RANKS, folder, fault, strategy, deadline=60.0)
    with Ranks(_rank, RANKS, folder, fault, strategy) as ranks:
        struck = time.monotonic()
        try:
            if fault.at:
                ranks.wait("struck")
            struck = time.monotonic()
            if fault.name.startswith("stopped"):
                ranks.signal(fault.culprit, signal.SIGSTOP)
            if fault.name.endswith("continued"):
                time.sleep(PROGRESS_TIMEOUT_S / 4)
                if "lost" in fault.name:
                    ranks.join_one(0, DEADLINE_S)
                (folder / "mark-continued").touch()
                ranks.signal(fault.culprit, signal.SIGCONT)
            survivors = [rank for rank in range(RANKS) if not (fault.gone and rank == fault.culprit)]
            ended = [ranks.join_one(rank, DEADLINE_S + 10.0 - (time.monotonic() - struck)) for rank in survivors]
            row |= {"outcome": _outcome(ended), "collective": _collective(folder, survivors)}
            row["seconds"] = round(time.monotonic() - struck, 2)
            intact = _intact(folder, ended, before[0].value["served"])
        except RankHangs:
            row |= {"outcome": "hang", "collective": "", "seconds": round(time.monotonic() - struck, 2)}
    again = run_ranks(_rank, RANKS, folder, None, strategy, deadline=60.0)
    row |= {"deadline_seconds": DEADLINE_S, "expected": fault.outcome}
    return row | {"previous_epoch": "intact" if intact else "damaged", "restart": _outcome(again)}


def _outcome(ended: Sequence[Outcome]) -> str:
    """What all of `ended` share, or what each said."""
    said = []
    for outcome in ended:
        if outcome.error:
            said.append(f"{outcome.error}({', '.join(map(str, outcome.culprits))})")
        else:
            said.append(UNTUNED if outcome.value["untuned"] else AGREED)
    tables = {outcome.value["digest"] for outcome in ended if not outcome.error}
    if len(set(said)) > 1 or len(tables) > 1:
        return "differ: " + "; ".join(said)
    return said[0]


def _collective(folder: Path, ranks: Sequence[int]) -> str:
    """What the survivors' collective calls came to; those that left by an exception of their own made none."""
    called = [path.read_text() for rank in ranks if (path := folder / f"collective-{rank}").exists()]
    return "; ".join(sorted(set(called)))


def _intact(folder: Path, ended: Sequence[Outcome], served: str) -> bool:
    """After an error, everyone still serves the epoch that was committed before, and the store holds nothing newer."""
    if not any(outcome.error for outcome in ended):
        return True
    stored = published(FilesystemStore(folder / "store"), DEPLOYMENT)
    kept = [path.read_text() for path in folder.glob("served-*")]
    return bool(stored) and stored[0].table == served and all(text == served for text in kept) and bool(kept)


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


class _FailingStore(FilesystemStore):
    """A disk that takes `room` more values and is full then."""

    room = 0

    def _write(self, key: str, value: bytes) -> None:
        if self.room <= 0:
            raise Unavailable("No space left on device")
        self.room -= 1
        super()._write(key, value)


def _rank(rank: Rank, fault: Fault | None, strategy: str) -> dict[str, Any]:
    """Without a fault: tune the problems "base", and leave. With one: adopt that epoch, meet the fault in a second pass or a reload,
    and make a collective call by what is served then."""
    culprit = fault is not None and rank.index == fault.culprit
    client = TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    group = _StruckGroup(
        client, rank.index, rank.size, progress_timeout=timedelta(seconds=PROGRESS_TIMEOUT_S), cap=timedelta(seconds=DEADLINE_S)
    )
    group.strike = lambda step: None
    dist.init_process_group("gloo", store=client, rank=rank.index, world_size=rank.size)
    folder = rank.folder / ("elsewhere" if culprit and fault and fault.name == "store not shared" else "store")
    store = _FailingStore(folder)
    store.room = 1 << 30
    versions = {"foreign": "2" if culprit and fault and fault.name == "other software version" else "1"}
    with Tuner(store=store, group=group, strategy=strategy, policy=POLICY, ladder=LADDER, deployment=DEPLOYMENT, device="cpu",
               versions={"foreign": "1"}) as tuner:  # fmt: skip
        base, new = _reduction(8), _reduction(16)
        tuner.record(SimulatedOperation("base", COSTS))
        tuner.record(base)
        if fault is None:
            report = tuner.run_pass()
            if (called := _call(rank, tuner, base)) != "served":
                raise RuntimeError(f"without a fault a collective call was {called}")
            return {"digest": tuner.epoch.digest, "served": tuner.epoch.digest, "untuned": any(row.winner is None for row in report.rows)}
        tuner.reload()  # what is served while the fault strikes
        (rank.folder / f"served-{rank.index}").write_text(tuner.epoch.digest)
        costs = dict(COSTS)
        operation = SimulatedOperation("new", costs)
        if culprit:
            environment = {"other software version": {"backends": tuple(versions.items())}, "other GPU name": {"device_name": "another"}}
            tuner.environment = dataclasses.replace(tuner.environment, **environment.get(fault.name, {}))  # type: ignore[arg-type]
            _prepare(fault, operation, costs, store)
            struck: list[str] = []

            def strike(step: str) -> None:
                if step == fault.at and not struck:
                    struck.append(step)
                    rank.mark("struck")
                    _meet(fault, rank, tuner, group, client)

            group.strike = new.strike = strike
        tuner.record(operation)
        tuner.record(new)
        called = ""
        try:
            if fault.name == "two tuners on one group":
                rank.group().close()  # refused: this rank has an open one
            untuned = not tuner.reload() if fault.phase == "reload" else any(row.winner is None for row in tuner.run_pass().rows)
            called = _call(rank, tuner, base if fault.phase == "reload" else new)
        except TuningError:
            called = _call(rank, tuner, base)
            raise
        finally:
            (rank.folder / f"served-{rank.index}").write_text(tuner.epoch.digest)
            (rank.folder / f"collective-{rank.index}").write_text(called)
        return {"digest": tuner.epoch.digest, "untuned": untuned}


def _prepare(fault: Fault, operation: SimulatedOperation, costs: dict[str, float | str], store: _FailingStore) -> None:
    """Faults that lie in what the culprit has."""
    match fault.name:
        case "other candidates":
            costs["only here"] = 1.0
        case "out of memory in one tactic":
            costs["quick"] = "oom"
        case "out of memory for the probe":
            operation.probe_fault = "oom"
        case "raises in one tactic":
            costs["quick"] = "raise"
        case "raises in all tactics":
            costs.update(dict.fromkeys(costs, "raise"))
        case "ends the process" | "ended the process twice before":
            costs["quick"] = "exit"
        case "slow but alive":
            costs.update({name: 120.0 * float(cost) for name, cost in COSTS.items()})
        case "full disk":
            store.room = 0
        case "store lost before the epoch":
            store.room = 1


def _meet(fault: Fault, rank: Rank, tuner: Tuner, group: RankGroup, client: TCPStore) -> None:
    """Faults that strike at a step."""
    if "killed" in fault.name:
        os.kill(os.getpid(), signal.SIGKILL)
    match fault.name:
        case "stopped" | "stopped in a collective":
            time.sleep(3600)  # the signal comes from outside, in the middle of this
        case "stopped and continued" | "stopped, lost, then continued":
            rank.wait("continued")
        case "late":
            time.sleep(PROGRESS_TIMEOUT_S / 2)
        case "late in a collective":
            time.sleep(PATIENCE_S + 1)
        case "raises in a collective":
            raise ValueError("the device reports an error flag")
        case "leaves by an exception":
            raise KeyError("calibration file")
        case "out of memory":
            raise MemoryError("no room for the table")
        case "late words of an old pass":
            for name in ("000002/0", "000002/all", "000003/all"):
                client.set(f"{group._base}/1/{name}", "late")  # pass 1 is over
        case "two passes at once":
            tuner.run_pass()
        case "another job publishes in between":
            with Tuner(store=f"{rank.folder}/store", policy=POLICY, ladder=LADDER, deployment=DEPLOYMENT, device="cpu",
                       versions={"foreign": "1"}) as other:  # fmt: skip
                other.record(SimulatedOperation("base", COSTS))  # its epoch holds what these ranks serve, too, and is newer
                other.record(SimulatedOperation("other job", COSTS))
                other.run_pass()
