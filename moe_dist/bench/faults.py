"""What happens to a group when something goes wrong on one rank: every fault in every phase, over real processes.

Owns the fault matrix. Three ranks serve a committed epoch, one of them (the culprit) meets a fault, and the rest is watched:
all survivors must end with one table, or with one error that names the culprit, within the deadline, with the previous epoch
intact; started again without the fault, the group must agree. A culprit that the fault neither kills nor stops must end as well, and
one that is started again alone meets its peers. How long processes take to start is no part of it. Beside tactics
that run alone the pool has finalize + all-reduce, by gloo and by shared memory, so that a divergence would hang; after the fault it
is called once. A fault is the real thing: a server that is killed, a disk that is full, an allocation that finds no room, another
job's process. cli and tests import this.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_dist.bench.fault_list import (
    AGREED,
    BY_GLOO,
    DEADLINE_S,
    DEPLOYMENT,
    FAULTS,
    PROGRESS_TIMEOUT_S,
    RANKS,
    STOPPED,
    Fault,
)
from moe_dist.bench.ranks import Outcome, RankHangs, Ranks, run_ranks
from moe_dist.bench.scarcity import why_no_small_disk
from moe_dist.bench.server import RedisServer, find_binary
from moe_dist.bench.struck import adopts, other_job, serves, struck_rank
from moe_dist.distributed.epoch import published
from moe_dist.stores.base import Store
from moe_dist.stores.open import open_store
from moe_dist.tuning.policy import STRATEGIES

_ATTEMPTS = 3  # at what a machine that stood still for a moment has spoiled: gloo was the fastest, by which no divergence would hang
START_S = 60.0  # in which ranks must have started, met and adopted the epoch to serve, before anything strikes
MARGIN_S = 2.0  # how long past the deadline a process is waited for; by then its row does not hold
ROWS_AT_ONCE = 2  # most of their time the ranks of a row wait


def fault_table(
    faults: Iterable[Fault] = FAULTS, strategies: Sequence[str] = STRATEGIES, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of phase, fault, strategy, outcome, collective, seconds, deadline_seconds, expected, previous_epoch, restart; one a pair.

    seconds: from the fault, or where it lies in what a rank was started with from the moment when all serve (or are about to, where it
    matters for that), to the end of the last process that the fault leaves running. outcome "hang": which outlasted the deadline; "hang
    before the fault": ranks did not get that far, within bounds of their own; "..., then ...": what the peers of one that was started
    again alone were told, and what all came to when they met; "not made": why a fault could not be.
    ConfigError: there is no server to kill.
    """
    find_binary()
    no_disk = why_no_small_disk()
    rows = []
    with tempfile.TemporaryDirectory(prefix="moe-dist-faults-") as name, ThreadPoolExecutor(ROWS_AT_ONCE) as pool:
        root = Path(name)
        for strategy in strategies:
            _serve_first(root / strategy, strategy)
        pairs = list(itertools.product(faults, strategies))

        def row(number: int) -> dict[str, Any]:
            fault, strategy = pairs[number]
            if fault.on_small_disk and no_disk is not None:
                return _not_made(fault, strategy, f"no small disk can be mounted here: {no_disk}")
            for attempt in range(_ATTEMPTS):
                made = _row(fault, strategy, root / strategy / "store", root / f"row-{number}-{attempt}")
                if made["collective"] != BY_GLOO:
                    break
            return made

        for made in pool.map(row, range(len(pairs))):
            rows.append(made)
            note(", ".join(f"{name} {value}" for name, value in made.items()))
    return rows


def _not_made(fault: Fault, strategy: str, why: str) -> dict[str, Any]:
    row: dict[str, Any] = {"phase": fault.phase, "fault": fault.name, "strategy": strategy, "outcome": f"not made: {why}", "collective": ""}
    row |= {"seconds": 0.0, "deadline_seconds": DEADLINE_S, "expected": fault.outcome}
    return row | {"previous_epoch": "unknown", "restart": "not made"}


def _serve_first(folder: Path, strategy: str, server: RedisServer | None = None) -> str:
    """The epoch that is served when a fault strikes, into a new store in `folder`, or on `server`; its URL."""
    url = f"unix://{server.socket}" if server else str(folder / "store")
    for _ in range(_ATTEMPTS):
        ended = run_ranks(struck_rank, RANKS, folder, None, strategy, url, deadline=START_S + DEADLINE_S)
        if (first := _outcome(ended)) == AGREED:
            return url
        if first != BY_GLOO:
            break
        if server:
            server.client().flushall()
        else:
            shutil.rmtree(folder / "store")
    raise RuntimeError(f"without a fault the ranks ended {first} under {strategy}: {ended}")


def _row(fault: Fault, strategy: str, served: Path, folder: Path) -> dict[str, Any]:
    """served: a store that holds the epoch to serve from; folder: for this row alone."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(durable=True)) if fault.on_server else None
        url = _serve_first(folder, strategy, server) if server else str(shutil.copytree(served, folder / "store"))
        before = published(_opened(stack, url), DEPLOYMENT)[0].table
        row: dict[str, Any] = {"phase": fault.phase, "fault": fault.name, "strategy": strategy}
        intact, since, late, job = True, time.monotonic(), "hang before the fault", None
        try:
            if fault.name == "another job publishes in between":
                job = stack.enter_context(Ranks(other_job, 1, folder / "job", url, folder))
                job.wait("ready", START_S)
            for _ in range(fault.deaths):
                with Ranks(struck_rank, RANKS, folder, fault, strategy, url) as ranks:
                    ranks.wait("struck", START_S + DEADLINE_S)
                    ranks.kill(fault.culprit)
                    ranks.join(DEADLINE_S)
            with Ranks(struck_rank, RANKS, folder, fault, strategy, url) as ranks:
                until = time.monotonic() + START_S
                for rank in range(RANKS):
                    ranks.wait((adopts if fault.from_the_start else serves)(rank), until - time.monotonic())
                strikes = fault.at and not fault.deaths
                if strikes:
                    ranks.wait("struck", DEADLINE_S)
                since, late = time.monotonic(), "hang"
                if strikes:
                    _meet_from_outside(fault, ranks, server)
                until = since + DEADLINE_S + MARGIN_S
                survivors = [rank for rank in range(RANKS) if not (fault.gone and rank == fault.culprit)]
                whose = range(RANKS) if fault.culprit_ends != STOPPED else survivors
                ended = {rank: ranks.join_one(rank, until - time.monotonic()) for rank in whose}
                row |= {"outcome": _ending(fault, folder, ended, survivors), "collective": _collective(folder, survivors)}
                if job and (other := _join_other(job, until)).error:
                    row["outcome"] += f"; the other job: {other.error}"
                row["seconds"] = round(time.monotonic() - since, 2)
                if server:
                    server.start()
                failed = fault.starts_again or any(ended[rank].error for rank in survivors)
                met = fault.starts_again and not any(outcome.error for outcome in ended.values())  # and committed a newer epoch
                newest = _seen(folder, survivors) if met else published(_opened(stack, url), DEPLOYMENT)[0].table
                intact = _intact(fault, folder, failed, newest, before)
        except RankHangs as hangs:
            row |= {"outcome": f"{late}: {hangs}", "collective": "", "seconds": round(time.monotonic() - since, 2)}
        return row | {
            "deadline_seconds": DEADLINE_S,
            "expected": fault.outcome,
            "previous_epoch": "intact" if intact else "damaged",
            "restart": _restarted(folder, strategy, url),
        }


def _restarted(folder: Path, strategy: str, url: str) -> str:
    """What the group comes to when all of it starts again, without the fault."""
    try:
        return _outcome(run_ranks(struck_rank, RANKS, folder, None, strategy, url, deadline=START_S + DEADLINE_S))
    except RankHangs:
        return "hang"


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
    elif fault.starts_again:
        ranks.start_again(fault.culprit)
    elif fault.name == "another job publishes in between":
        return  # it says itself when it is done
    elif server:
        server.stop()
    (ranks.folder / "mark-continued").touch()


def _join_other(job: Ranks, until: float) -> Outcome:
    """RankHangs: it still runs then."""
    try:
        return job.join_one(0, until - time.monotonic())
    except RankHangs:
        raise RankHangs("the other job still runs at its deadline") from None


def _ending(fault: Fault, folder: Path, ended: Mapping[int, Outcome], survivors: Sequence[int]) -> str:
    """What all survivors came to, and what the culprit did where it must not. ended: by rank, of all that ended by themselves."""
    if fault.starts_again:
        told = {path.read_text() if (path := folder / f"told-{rank}").exists() else "nothing" for rank in survivors}
        return f"{'; '.join(sorted(told))}, then {_outcome(list(ended.values()))}"
    came_to = _outcome([ended[rank] for rank in survivors])
    if fault.gone and fault.culprit in ended and (own := _said(ended[fault.culprit])) != fault.culprit_ends:
        came_to += f"; rank {fault.culprit} itself: {own}, not {fault.culprit_ends}"
    return came_to


def _said(outcome: Outcome) -> str:
    if outcome.error:
        return f"{outcome.error}({', '.join(map(str, outcome.culprits))})"
    return str(outcome.value["ending"])


def _outcome(ended: Sequence[Outcome]) -> str:
    """What all of `ended` share, or what each said."""
    said = [_said(outcome) for outcome in ended]
    tables = {outcome.value["digest"] for outcome in ended if not outcome.error}
    if len(set(said)) > 1 or len(tables) > 1:
        return "differ: " + "; ".join(said)
    return said[0]


def _collective(folder: Path, ranks: Sequence[int]) -> str:
    """What the survivors' collective calls came to; those that left by an exception of their own made none."""
    called = [path.read_text() for rank in ranks if (path := folder / f"collective-{rank}").exists()]
    return "; ".join(sorted(set(called)))


def _seen(folder: Path, ranks: Sequence[int]) -> str:
    """The newest epoch that the store held when `ranks` were told that one of them was started again, before all met it."""
    return "; ".join(sorted({path.read_text() for rank in ranks if (path := folder / f"stored-{rank}").exists()}))


def _intact(fault: Fault, folder: Path, failed: bool, stored: str, before: str) -> bool:
    """After an error, or with a store that died, it holds nothing newer than the epoch that was committed before; after an error
    everyone still serves that."""
    kept = [path.read_text() for path in folder.glob("served-*")]
    served = not failed or (bool(kept) and all(text == before for text in kept))
    return served and (stored == before or not (failed or fault.on_server))
