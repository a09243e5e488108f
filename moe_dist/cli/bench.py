"""`moe-dist bench`: benchmarks of the tuner itself, and of the kernels (`bench_kernels.py`). Parses, runs what `moe_dist.bench` holds, shows it and judges it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from moe_dist.bench import report
from moe_dist.bench.agreement import diverged_table
from moe_dist.bench.faults import fault_table
from moe_dist.bench.lookup import lookup_table
from moe_dist.bench.scaling import KEYS, RANKS, scaling_table
from moe_dist.cli import bench_kernels

HELP = "measure what is promised: agreement between ranks, survival of faults, the cost of a lookup, kernels beside their peers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    agreement = kinds.add_parser("agreement", help="do ranks run the same tactics, and what ends a pass that meets a fault?")
    agreement.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="group sizes, each a row an arm (default: 2 4 8)")
    agreement.add_argument("--keys", type=int, default=50, help="problem x mode x bucket; a multiple of 5 (default: 50)")
    agreement.add_argument("--calls", type=int, default=1000, help="calls of each rank, of uneven token counts (default: 1000)")
    agreement.add_argument("--faults", action="store_true", help="also every fault in every phase and strategy, over 3 ranks: minutes")
    agreement.add_argument("--json", type=Path, help="write the tables here")
    agreement.set_defaults(kind=_agreement)
    compared = kinds.add_parser("kernels", help=bench_kernels.HELP)
    bench_kernels.add_arguments(compared)
    compared.set_defaults(kind=bench_kernels.run)
    lookup = kinds.add_parser("lookup", help="the host time of finding the tactic of a call")
    lookup.add_argument("--json", type=Path, help="write the table here")
    lookup.set_defaults(kind=_lookup)
    scaling = kinds.add_parser("scaling", help="requests, bytes and seconds of agreement and reload as ranks and keys grow")
    scaling.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    scaling.add_argument("--keys", type=int, nargs="+", default=list(KEYS))
    scaling.add_argument("--json", type=Path, help="write the table here")
    scaling.set_defaults(kind=_scaling)


def run(arguments: argparse.Namespace) -> int:
    """0: what was measured holds its bars; 1: it does not, and stderr says what."""
    code: int = arguments.kind(arguments)
    return code


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _agreement(arguments: argparse.Namespace) -> int:
    diverged = diverged_table(arguments.ranks, arguments.keys, arguments.calls, _note)
    objections = report.diverged_objections(diverged, arguments.ranks, arguments.keys, arguments.calls)
    tables = {"divergence": diverged}
    if arguments.faults:
        tables["faults"] = fault_table(note=_note)
        objections += report.fault_objections(tables["faults"])
    command = f"moe-dist bench agreement --ranks {shlex.join(map(str, arguments.ranks))} --keys {arguments.keys} --calls {arguments.calls}"
    return _finish(arguments.json, command + (" --faults" if arguments.faults else ""), tables, objections)


def _lookup(arguments: argparse.Namespace) -> int:
    rows = lookup_table()
    return _finish(arguments.json, "moe-dist bench lookup", {"lookup": rows}, report.lookup_objections(rows))


def _scaling(arguments: argparse.Namespace) -> int:
    return _finish(arguments.json, "moe-dist bench scaling", {"scaling": scaling_table(arguments.ranks, arguments.keys, _note)}, [])


def _finish(path: Path | None, command: str, tables: dict[str, list[dict[str, object]]], objections: list[str]) -> int:
    for title, rows in tables.items():
        report.show(title, rows)
    if path is not None:
        report.write(path, report.document(command, tables))
    for objection in objections:
        print(f"moe-dist bench: {objection}", file=sys.stderr)
    return 1 if objections else 0
