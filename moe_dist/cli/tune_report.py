"""What `moe-dist tune` shows and writes: the progress bar, the summary table, the JSON. Decides nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from moe_dist.cli.output import counted, note
from moe_dist.config import MoEConfig, summarize
from moe_dist.interop.hf_config import ModelShape
from moe_dist.tuning.pass_terms import BUDGET_ENDED, ProgressEvent
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.tuner import PassReport, Row


@dataclasses.dataclass
class TuneResult:
    """How a run went. reports: of the committed passes, out of `passes`. diverged: keys whose winner differs between ranks;
    None: the run ended before ranks could compare. error: why it ended early. not_kept: why its winners outlive it nowhere.
    short: why some cells have none.
    group: which of several groups, each with a result of its own; "": the only one."""

    ranks: int
    store: str
    passes: int
    reports: list[PassReport] = dataclasses.field(default_factory=list)
    diverged: int | None = None
    seconds: float = 0.0
    error: str | None = None
    exit_code: int = 0
    not_kept: str | None = None
    short: str | None = None
    group: str = ""

    @property
    def rows(self) -> list[Row]:
        return [row for report in self.reports for row in report.rows]

    @property
    def has_winners(self) -> bool:
        return any(row.winner is not None for row in self.rows)

    @property
    def measured(self) -> int:
        return sum(report.measured for report in self.reports)

    @property
    def hits(self) -> int:
        return sum(report.hits for report in self.reports)


class Progress:
    """On stderr, over all cells of all passes: a live bar on a terminal; in a log, a line for each pass that timed anything.
    Silent unless `shown`."""

    def __init__(self, cells: int, *, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._lines = shown and not console.is_terminal
        self._bar = Bar(*columns, console=console, disable=not shown or self._lines, transient=True)
        self._task = self._bar.add_task("agreeing", total=cells)
        self._before = 0
        self._cells = cells
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, event: ProgressEvent) -> None:
        doing = f"timing {event.cell.bucket} tokens, {event.cell.mode}" if event.cell else f"{event.phase}"
        self._bar.update(self._task, description=doing, completed=self._before + event.done)

    def next_pass(self, report: PassReport) -> None:
        """A pass is over, its cells served or timed."""
        self._before += len(report.rows)
        self._bar.update(self._task, completed=self._before)
        if self._lines and report.measured:
            buckets = ", ".join(dict.fromkeys(str(row.cell.bucket) for row in report.rows))
            took = time.monotonic() - self._started
            line = f"{self._before} of {self._cells} cells, {took:.0f} s: {counted(report.measured, 'candidate')} timed at {buckets} tokens"
            if all(row.winner is None for row in report.rows):
                line += ", none to the end"
            note(f"moe-dist: {line}")


def count_diverged(reports: Sequence[PassReport], group: dist.ProcessGroup | None) -> int:
    """Keys whose winner is not the same on all ranks of `group`, compared rank by rank. A collective call."""
    mine = {row.key: str(row.winner.tactic) if row.winner else "" for report in reports for row in report.rows}
    if group is None:
        return 0
    tables: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(tables, mine, group)
    return sum(len({table.get(key) for table in tables}) > 1 for key in {key for table in tables for key in table})


def why_short(result: TuneResult, budget: timedelta | None, policy: MeasurementPolicy) -> str | None:
    """Which cells have no winner since the budget ended, and a budget that would do; None: all were timed, or failed."""
    cells: dict[str, list[str]] = {}
    for row in result.rows:
        if row.untimed == BUDGET_ENDED:
            cells.setdefault(row.cell.mode, []).append(str(row.cell.bucket))
    if not cells or budget is None:
        return None
    short = [report for report in result.reports if any(row.untimed == BUDGET_ENDED for row in report.rows)]
    # What ended had its first look at least, one sweep of all that a cell may take.
    longest = max((report.seconds for report in short if report.measured), default=0.0)
    enough = result.passes * longest * (1 + policy.rounds * policy.sweeps)
    named = "; ".join(f"{mode} at {', '.join(buckets)} tokens" for mode, buckets in cells.items())
    return (
        f"{sum(map(len, cells.values()))} of {len(result.rows)} cells have no winner ({named}): the budget of {budget.total_seconds():g} s, "
        f"an equal share for each of {result.passes} buckets, ended before a candidate was timed to the end; "
        f"give {f'--budget {_rounded_up(enough)}' if enough else 'more'}, or none"
    )


def _rounded_up(number: float) -> int:
    """To two digits."""
    unit: int = 10 ** max(0, len(str(math.ceil(number))) - 2)
    return math.ceil(number / unit) * unit


def print_summary(config: MoEConfig, result: TuneResult, out: TextIO) -> None:
    modes = {row.cell.mode for row in result.rows}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tokens", *(["mode"] if len(modes) > 1 else []), "default", "us", "winner", "us", "gain", "source"):
        # A terminal that is too narrow breaks tactics over lines, and nothing else: every figure stays whole.
        table.add_column(
            name,
            justify="right" if name in ("tokens", "us", "gain") else "left",
            no_wrap=name not in ("default", "winner"),
            overflow="fold",
        )
    for row in result.rows:
        cells = [str(row.cell.bucket), *([row.cell.mode] if len(modes) > 1 else [])]
        if (winner := row.winner) is None:
            table.add_row(*cells, "", "", f"(the default, untimed: {row.untimed})", "", "", "")
            continue
        default_us, gain = "fails", ""
        if winner.default_us is not None:
            default_us, gain = f"{winner.default_us:.1f}", f"{winner.default_us / winner.tactic_us:.2f}x"
        table.add_row(*cells, str(winner.default), default_us, str(winner.tactic), f"{winner.tactic_us:.1f}", gain, winner.source)
    console = Console(file=out, highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # a log has no right margin
    with console.capture() as shown:  # printed as all else is: where nobody reads, rich would end the process in its own way
        console.print(f"{result.group}{result.group and ': '}{summarize(config.to_dict())}")
        if result.rows:
            console.print(table)
    print(shown.get(), end="", file=out)
    print_totals(result, out)


def print_totals(result: TuneResult, out: TextIO) -> None:
    """The last line of the summary: all that is said of a group other than the first."""
    print(f"{result.group}{result.group and ': '}{_totals(result)}", file=out, flush=True)


def _totals(result: TuneResult) -> str:
    cells = len(result.rows)
    place, measured = f"in {result.store}", counted(result.measured, "candidate")
    if result.not_kept:  # of a layered store the local one has them
        place = f"{'on this host alone' if result.store.startswith('layered:') else 'nowhere'} ({result.not_kept})"
    if result.error:
        stay = "are kept" if result.not_kept else "stay"
        return f"{len(result.reports)} of {result.passes} buckets were committed and {stay} {place}; measured {measured} in {result.seconds:.1f} s"
    agreed = f"{result.diverged or 'no'} key{'s differ' if result.diverged != 1 else ' differs'} between {result.ranks} ranks"
    if result.ranks == 1:
        agreed = "one rank"
    if cells and result.measured == 0 and result.hits == cells:
        came = f"all {cells} winners" if cells > 1 else "the one winner"
        return f"measured nothing: {came} came from {result.store}; {agreed}; {result.seconds:.1f} s"
    untimed = sum(row.winner is None for row in result.rows)
    short = f"{untimed} without a winner; " if untimed else ""
    kept = f"kept {place}" if result.has_winners else "no winner to keep"
    return f"measured {measured}, {counted(result.hits, 'hit')} of {cells}; {short}{agreed}; {result.seconds:.1f} s; {kept}"


def write_json(path: Path, shape: ModelShape, config: MoEConfig, arguments: argparse.Namespace, result: TuneResult) -> None:
    """One object: what was asked, `keys` (one a cell) and the totals. OSError: it can't be written."""
    last = result.reports[-1] if result.reports else None
    document = {
        "model": shape.name,
        "family": shape.family,
        "config": config.to_dict(),
        "group": result.group or None,
        "ranks": result.ranks,
        "device": arguments.device,
        "policy": arguments.policy,
        "strategy": arguments.strategy,
        "objective": arguments.objective,
        "store": result.store,
        "not_kept": result.not_kept,
        "epoch": last.epoch if last else None,
        "digest": last.digest if last else None,
        "keys": [_key(row) for row in result.rows],
        "rejected": [
            {"tokens": [cell.bucket.low, cell.bucket.high], "mode": cell.mode, "tactic": str(tactic), "reason": reason}
            for report in result.reports
            for cell, tactic, reason in report.rejected
        ],
        "measured": result.measured,
        "hits": result.hits,
        "diverged": result.diverged,
        "seconds": round(result.seconds, 3),
        "error": result.error,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _key(row: Row) -> dict[str, Any]:
    """source: "tuned", "hit", "epoch"; "untimed" where nothing was timed to the end and the default serves, for the reason in `untimed`."""
    cell, winner = row.cell, row.winner
    return {
        "key": row.key,
        "mode": cell.mode,
        "bucket": [cell.bucket.low, cell.bucket.high],
        "winner": str(winner.tactic) if winner else None,
        "winner_us": winner.tactic_us if winner else None,
        "default": str(winner.default) if winner else None,
        "default_us": winner.default_us if winner else None,
        "source": winner.source if winner else "untimed",
        "untimed": row.untimed,
    }
