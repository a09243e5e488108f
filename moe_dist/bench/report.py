"""What the benchmarks write and what it must hold: one JSON file of rows a benchmark, and the bars that judge it.

Owns the form of docs/evidence/agreement.json and the reasons to refuse one. Runs nothing. cli and tests import this.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from moe_dist.bench.agreement import ARMS, UNPROTECTED
from moe_dist.bench.fault_list import FAULTS
from moe_dist.bench.persistence import LIMITS_S
from moe_dist.tuning.policy import STRATEGIES

LOOKUP_BAR_NS = 1000
DIVERGED_FIELDS = ("strategy", "ranks", "keys", "calls", "diverged", "seconds")
FAULT_FIELDS = (
    "phase", "fault", "strategy", "outcome", "collective", "seconds", "deadline_seconds", "expected", "previous_epoch", "restart"
)  # fmt: skip

STORE_FIELDS = ("store", "what", "count", "median_s", "worst_s", "limit_s", "holds", "load")


def document(command: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The tables with what made them: command, time, machine and versions."""
    return {
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"platform": platform.platform(), "cores": len(os.sched_getaffinity(0)), "scheduling": _scheduling()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "msgpack")},
        **tables,
    }


def _scheduling() -> str:
    """Whether other work on the machine could take the cores."""
    return "real time" if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR) else "normal"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """One row a line, so that a diff shows which row changed."""
    parts = []
    for name, value in content.items():
        if isinstance(value, (list, tuple)):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            parts.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def show(title: str, rows: Sequence[Mapping[str, Any]], out: TextIO | None = None) -> None:
    """A table on a terminal that is wide enough for it, else tab-separated lines under a line of names. out: None: stdout."""
    names = list(rows[0]) if rows else []
    cells = [[str(value) for value in row.values()] for row in rows]
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for row in cells:
        table.add_row(*row)
    console = Console(file=out)
    unbound = console.options.update(width=10_000)
    if console.is_terminal and console.measure(table, options=unbound).maximum <= console.width:
        with console.capture() as shown:  # printed as all else is: where nobody reads, rich would end the process in its own way
            console.print(table)
        print(shown.get(), end="", file=console.file)
        return
    for line in (title, *("\t".join(row) for row in ([names, *cells] if names else []))):
        print(line, file=console.file)


def diverged_objections(rows: Sequence[Mapping[str, Any]], ranks: Iterable[int], keys: int, calls: int) -> list[str]:
    """What is missing or wrong in a divergence table: every number of ranks and arm once, all keys compared, none diverged
    under a strategy, and some where ranks tune apart, else the clocks were not noisy enough to show anything."""
    found = _doubles(rows, ("strategy", "ranks"))
    held = {(row["strategy"], row["ranks"]): row for row in rows}
    for size in ranks:
        for arm in ARMS:
            row = held.get((arm, size))
            if row is None:
                found.append(f"no row for {arm} over {size} ranks")
                continue
            found += [f"{arm} over {size} ranks: no field {name}" for name in DIVERGED_FIELDS if name not in row]
            where = f"{arm} over {size} ranks"
            if (row.get("keys"), row.get("calls")) != (keys, calls):
                found.append(f"{where}: {row.get('keys')} keys in {row.get('calls')} calls, not {keys} in {calls}")
            if arm == UNPROTECTED and not row.get("diverged"):
                found.append(f"{where}: nothing diverged, so the clocks were not noisy")
            if arm != UNPROTECTED and row.get("diverged") != 0:
                found.append(f"{where}: {row.get('diverged')} keys diverged")
    return found


def fault_objections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is missing or wrong in a fault matrix: every fault in every strategy once, the outcome that it must have on all
    survivors, what a collective call comes to then, inside the deadline, with the previous epoch intact, and healed by a restart."""
    found = _doubles(rows, ("phase", "fault", "strategy"))
    held = {(row["phase"], row["fault"], row["strategy"]): row for row in rows}
    for fault in FAULTS:
        for strategy in STRATEGIES:
            row = held.get((fault.phase, fault.name, strategy))
            where = f"{fault.name} in {fault.phase} under {strategy}"
            if row is None:
                found.append(f"no row for {where}")
                continue
            found += [f"{where}: no field {name}" for name in FAULT_FIELDS if name not in row]
            if row.get("outcome") != fault.outcome:
                found.append(f"{where}: {row.get('outcome')}, not {fault.outcome}")
            if row.get("collective") != fault.collective:
                found.append(f"{where}: then a collective call was {row.get('collective')}, not {fault.collective}")
            if not row.get("seconds", 1e9) <= row.get("deadline_seconds", 0):
                found.append(f"{where}: {row.get('seconds')} s, past its deadline of {row.get('deadline_seconds')} s")
            if row.get("previous_epoch") != "intact":
                found.append(f"{where}: the previous epoch is {row.get('previous_epoch')}")
            if row.get("restart") != "agreed":
                found.append(f"{where}: after a restart {row.get('restart')}")
    return found


def lookup_objections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lookups that take a microsecond or more."""
    return [
        f"{row['part']} takes {row['nanoseconds']} ns; the bar is {LOOKUP_BAR_NS}" for row in rows if row["nanoseconds"] >= LOOKUP_BAR_NS
    ]


def store_objections(
    rows: Sequence[Mapping[str, Any]], stores: Iterable[str], asked: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """What is missing or wrong in a table of stores: attaching and reloading once for each of `stores`, of the size that the bar
    is for, or that was asked for of what is measured, and in median below it."""
    found = _doubles(rows, ("store", "what"))
    held = {(row["store"], row["what"]): row for row in rows}
    for store in stores:
        for what, (count, limit_s) in LIMITS_S.items():
            row = held.get((store, what))
            where = f"{what} from {store}"
            if row is None:
                found.append(f"no row for {where}")
                continue
            found += [f"{where}: no field {name}" for name in STORE_FIELDS if name not in row]
            if row.get("count") != asked.get(what, count):
                found.append(f"{where}: of {row.get('count')}, not {asked.get(what, count)}")
            holds = row.get("median_s", 1e9) < limit_s
            if row.get("holds") is not holds or row.get("limit_s") != limit_s:
                found.append(f"{where}: {row.get('median_s')} s against {row.get('limit_s')} s is said to hold: {row.get('holds')}")
            if not holds:
                found.append(f"{where}: {row.get('median_s')} s; the bar is {limit_s} s")
    return found


def _doubles(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    seen: set[tuple[Any, ...]] = set()
    found = []
    for row in rows:
        cell = tuple(row.get(name) for name in names)
        if cell in seen:
            found.append(f"two rows for {' '.join(map(str, cell))}")
        seen.add(cell)
    return found
