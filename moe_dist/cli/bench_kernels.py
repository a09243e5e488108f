"""`moe-dist bench kernels`: our kernels beside the peers that can be imported. Parses, resumes, merges, saves and shows; `moe_dist.bench` times."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_dist.backends.triton import compiled_variants
from moe_dist.bench import kernel_bars, kernel_inputs, kernels, report
from moe_dist.bench.peers import FAMILIES, open_peers
from moe_dist.cli.output import note
from moe_dist.errors import ConfigError
from moe_dist.tuning.identity import build_environment

ARCHS = (90, 100)
HELP = "our kernels beside other people's, in one process on one card"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def some(names: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in names]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; choose some of {','.join(names)}")
            return chosen

        return parse

    def existing(text: str) -> Path:
        if not (path := Path(text)).is_file():
            raise argparse.ArgumentTypeError(f"there is no file {text!r} in {Path.cwd()}")
        return path

    def counts(text: str) -> list[int]:
        if not all(part.isdigit() and int(part) for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of token counts like 1,16,256")
        return sorted({int(part) for part in text.split(",")})

    parser.add_argument(
        "--peers",
        type=some(FAMILIES),
        default=["vllm", "torch"],
        help=f"families of {','.join(FAMILIES)}; those that can't be imported are named (default vllm,torch)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="rows are written here as they come; those that are there already are kept"
    )
    parser.add_argument("--again", action="store_true", help="time what FILE holds already once more")
    parser.add_argument(
        "--merge", type=existing, nargs="+", metavar="PART", help="time nothing: write the rows of these files to --json, and judge them"
    )
    parser.add_argument(
        "--shapes",
        type=some([shape.name for shape in kernel_inputs.SHAPES]),
        help=f"default: all: {','.join(shape.name for shape in kernel_inputs.SHAPES)}",
    )
    parser.add_argument("--dtypes", type=some(kernel_inputs.DTYPES), default=list(kernel_inputs.DTYPES), help="default: bf16,fp8")
    parser.add_argument(
        "--tokens", type=counts, default=list(kernel_inputs.TOKENS), help=f"default: {','.join(map(str, kernel_inputs.TOKENS))}"
    )
    parser.add_argument(
        "--modes",
        type=some(kernel_inputs.MODES),
        default=list(kernel_inputs.MODES),
        help="default: cuda_graph,eager (eager at one token alone)",
    )
    parser.add_argument(
        "--tune",
        choices=("ladder", "cells"),
        default="ladder",
        help="ladder: all powers of two, cold and warm, timed; cells: the cells' buckets alone (default ladder)",
    )
    parser.add_argument("--minutes", type=float, help="start no cell after so long; the next call goes on (default: no limit)")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="time nothing and need no card: compile every kernel of the triton backend's tactics and write what each takes",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu compares torch's own paths alone (default cuda)")


def run(arguments: argparse.Namespace) -> int:
    """0: all cells are timed and right; 1: not all, and stderr says which. Bars are shown, whether they hold or not."""
    began = time.monotonic()
    shapes = [shape for shape in kernel_inputs.SHAPES if arguments.shapes is None or shape.name in arguments.shapes]
    modes = arguments.modes if arguments.device == "cuda" else [mode for mode in arguments.modes if mode == "eager"]
    plan = kernels.Plan(shapes=shapes, dtypes=arguments.dtypes, tokens=arguments.tokens, modes=modes, ladder=arguments.tune == "ladder")
    if arguments.compile_only:
        return _compile(arguments, plan)
    if arguments.merge:
        document = kernel_bars.merged([json.loads(part.read_text()) for part in arguments.merge])
        if arguments.json is not None:
            report.write(arguments.json, document)
        return _finish(document, plan)
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device in this process; use --device cpu, which compares torch's own paths")
    document = _document(arguments, device)
    path: Path | None = arguments.json
    if path is not None and path.exists() and not arguments.again:
        held = json.loads(path.read_text())
        kernel_bars.require_alike(held, document)
        document = kernel_bars.merged([held, document])
    rows, tuning = document["kernels"], document["tuning"]

    def save() -> None:
        if path is not None:
            document["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            beside = path.with_name(path.name + ".part")
            report.write(beside, document)
            beside.replace(path)  # an interrupt leaves whole rows

    with open_peers(arguments.peers, device, max(plan.tokens)) as found:
        document["peers"] |= {family: f"missing: {reason}" for family, reason in found.missing.items()} | {
            peer.name: peer.version for peer in found.peers
        }
        for family, reason in found.missing.items():
            note(f"peer {family} can't be had: {reason}")
        tag = {"kernel_sources": build_environment(device).kernel_sources[:8]}
        stop_at = None if arguments.minutes is None else began + 60 * arguments.minutes
        left = kernels.run_matrix(plan, found.peers, device, rows=rows, tuning=tuning, save=save, note=note, stop_at=stop_at, tag=tag)
    save()
    code = _finish(document, plan)
    if left:
        note(f"moe-dist bench: {left} cells are left; run the same command again")
    return 1 if left else code


def _document(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    command = ["moe-dist", "bench", "kernels", "--peers", ",".join(arguments.peers)]
    for name, default in (
        ("shapes", None),
        ("dtypes", list(kernel_inputs.DTYPES)),
        ("tokens", list(kernel_inputs.TOKENS)),
        ("modes", list(kernel_inputs.MODES)),
    ):
        if (value := getattr(arguments, name)) != default:
            command += [f"--{name}", ",".join(map(str, value))]
    environment = build_environment(device)
    document = report.document(shlex.join(command), {})
    document["machine"] |= {"gpu": environment.device_name, "driver": environment.driver}
    document["versions"] |= {"triton": environment.triton, "cuda": environment.cuda}
    return document | {"ceilings": kernel_inputs.CEILINGS.get(environment.device_name), "peers": {}, "kernels": [], "tuning": []}


def _compile(arguments: argparse.Namespace, plan: kernels.Plan) -> int:
    """The first shape asked for in each dtype, for both architectures: kernels of other shapes differ in sizes that cut nothing."""
    rows = []
    for dtype in plan.dtypes:
        shape = next(shape for shape in plan.shapes if dtype in shape.dtypes)
        problem = shape.problem(dtype, max_num_tokens=max(plan.tokens))
        for arch in ARCHS:
            began = time.monotonic()
            found = compiled_variants(problem, problem.ladder.buckets(), arch)
            rows += [{"shape": shape.name, "dtype": dtype} | row for row in found]
            note(f"{shape.name} {dtype} sm_{arch}: {len(found)} kernels in {time.monotonic() - began:.0f} s")
    environment = build_environment(torch.device("cpu"))
    document = report.document("moe-dist bench kernels --compile-only", {}) | {
        "kernel_sources": environment.kernel_sources,
        "compiled": rows,
    }
    document["versions"] |= {"triton": environment.triton}
    if arguments.json is not None:
        report.write(arguments.json, document)
    report.show("kernels that keep something in local memory", [_short(row) for row in rows if row.get("local_bytes")])
    failed = [row for row in rows if "reason" in row]
    for row in failed:
        note(f"moe-dist bench: {row}")
    print(f"{len(rows)} kernels, {sum(bool(row.get('local_bytes')) for row in rows)} with local memory, {len(failed)} that do not compile")
    return 1 if failed else 0


def _short(row: dict[str, Any]) -> dict[str, Any]:
    cut = ", ".join(f"{name}={value}" for name, value in row.items() if name.isupper())
    kept = ("dtype", "arch", "kernel", "warps", "stages", "registers", "local_bytes", "shared_bytes", "matrix_unit")
    return {name: row[name] for name in kept} | {"cut": cut}


def _finish(document: dict[str, Any], plan: kernels.Plan) -> int:
    rows, tuning = document["kernels"], document["tuning"]
    names = [name for name, said in document["peers"].items() if not said.startswith("missing")]
    able = {name: [dtype for dtype in kernel_inputs.DTYPES if kernel_bars.times(name, dtype)] for name in names}
    print(kernel_bars.tables(rows, tuning))
    print()
    for bar in kernel_bars.bars(rows, tuning):
        print(f"- {bar}")
    found = kernel_bars.objections(rows, tuning, plan, able)
    for objection in found:
        note(f"moe-dist bench: {objection}")
    return 1 if found else 0
