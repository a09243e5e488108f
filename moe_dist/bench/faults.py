"""What happens to a group when something goes wrong on one rank: every fault in every phase, over real processes.

Owns the fault matrix. Three ranks serve a committed epoch, one of them (the culprit) meets a fault, and the rest is watched:
all survivors must end with one table, or with one error that names the culprit, within the deadline, with the previous epoch
intact; started again without the fault, the group must agree. Beside tactics that run alone the pool has finalize + all-reduce,
by gloo and by shared memory, so that a divergence would hang; after the fault it is called once. A fault is the real thing: a
server that is killed, a disk that is full, an allocation that finds no room, another job's process. cli and tests import this.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
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
    Fault,
)
from moe_dist.bench.ranks import Outcome, RankHangs, Ranks, run_ranks
from moe_dist.bench.scarcity import why_no_small_disk
from moe_dist.bench.server import RedisServer, find_binary
from moe_dist.bench.struck import other_job, struck_rank
from moe_dist.distributed.epoch import published
from moe_dist.stores.base import Store
from moe_dist.stores.open import open_store
from moe_dist.tuning.policy import STRATEGIES

_ATTEMPTS = 3  # at what a machine that stood still for a moment has spoiled: gloo was the fastest, by which no divergence would hang
ROWS_AT_ONCE = 2  # most of their time the ranks of a row wait


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
        ended = run_ranks(struck_rank, RANKS, folder, None, strategy, url, deadline=60.0)
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
        if fault.name == "another job publishes in between":
            stack.enter_context(Ranks(other_job, 1, folder / "job", url, folder)).wait("ready")
        row: dict[str, Any] = {"phase": fault.phase, "fault": fault.name, "strategy": strategy}
        for _ in range(fault.deaths):
            with Ranks(struck_rank, RANKS, folder, fault, strategy, url) as ranks:
                ranks.wait("struck")
                ranks.kill(fault.culprit)
                ranks.join(60.0)
        intact = True
        with Ranks(struck_rank, RANKS, folder, fault, strategy, url) as ranks:
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
        again = run_ranks(struck_rank, RANKS, folder, None, strategy, url, deadline=60.0)
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
    elif fault.starts_again:
        ranks.start_again(fault.culprit)
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
