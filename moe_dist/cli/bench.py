"""`moe-dist bench`: benchmarks of the tuner itself, and of the kernels (`bench_kernels.py`). Parses, runs what `moe_dist.bench` holds, shows it and judges it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moe_dist.bench import engines, report, soak
from moe_dist.bench.agreement import diverged_table
from moe_dist.bench.faults import fault_table
from moe_dist.bench.lookup import lookup_table
from moe_dist.bench.persistence import ENTRIES, REPEATS, WINNERS, stores_table
from moe_dist.bench.scaling import KEYS, RANKS, scaling_table
from moe_dist.bench.server import RedisServer, ServerLost, find_binary
from moe_dist.bench.servers import CLIENTS, require_room, servers_table
from moe_dist.cli import bench_kernels
from moe_dist.cli.checks import positive, quiet_stores, require_folder_of, require_reached, require_writable, store_url
from moe_dist.cli.output import counted, hurry, note
from moe_dist.errors import ConfigError, StoreError
from moe_dist.stores.open import open_store
from moe_dist.stores.redis_url import RedisAddress

OWN = Path(".tuned")  # where what has no name lies; it is made once nothing speaks against a start
OWN_SERVER = "own"  # instead of a URL
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
    sizes, counts = (" ".join(map(str, numbers)) for numbers in (RANKS, KEYS))
    scaling.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help=f"group sizes of at least 2 (default: {sizes})")
    scaling.add_argument("--keys", type=int, nargs="+", default=list(KEYS), help=f"problem x mode x bucket (default: {counts})")
    scaling.add_argument(
        "--redis",
        metavar="URL",
        help=f"also: what thousands of clients get out of this server, or of one that is started for it ({OWN_SERVER}), and out of one rendezvous",
    )
    asking = " ".join(map(str, CLIENTS))
    scaling.add_argument("--clients", type=positive, nargs="+", default=list(CLIENTS), help=f"with --redis (default: {asking})")
    scaling.add_argument("--json", type=Path, help="write the table here")
    scaling.set_defaults(kind=_scaling)
    vllm = kinds.add_parser("vllm", help="output tokens/s and inter-token latency of a vLLM with moe_dist against the same vLLM without")
    vllm.add_argument(
        "--cards", type=int, nargs="+", default=[0], help="the dtypes are shared out over them; with --tp they serve together"
    )
    vllm.add_argument("--dtypes", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    vllm.add_argument("--modes", nargs="+", choices=("cuda_graph", "eager"), default=["cuda_graph", "eager"])
    vllm.add_argument("--batches", type=int, nargs="*", default=[1, 32, 256])
    pairs = ", ".join(f"{count} in {mode}" for mode, count in engines.PAIRS.items())
    vllm.add_argument("--pairs", type=positive, help=f"interleaved pairs a cell (default {pairs})")
    vllm.add_argument("--layers", type=int, default=36, help="of a Qwen3-30B-A3B, which has 48 (default 36: two engines on 140 GB)")
    vllm.add_argument("--model", type=Path, help="serve this folder, weights as stored, instead of that shape with drawn weights")
    vllm.add_argument("--tp", type=int, default=1)
    vllm.add_argument("--experts", nargs="+", choices=("cut", "shared"), default=["cut"], help="how --tp ranks hold them (default cut)")
    vllm.add_argument("--control", action="store_true", help="ask a second stock engine too: what two equal ones differ by")
    vllm.add_argument(
        "--memory", type=float, default=0.45, help="share of a card that each engine may take, two or with --control three (default 0.45)"
    )
    vllm.add_argument("--workers", choices=("fork", "spawn", "inside"), default="fork", help="how an engine's core is made (default fork)")
    vllm.add_argument("--budget-s", type=float, default=120.0, help="seconds for measuring (default 120)")
    vllm.add_argument(
        "--store",
        type=lambda text: Path(store_url(text)),
        default=OWN / "engines",
        help="of winners; an empty one makes the first start a cold one",
    )
    vllm.add_argument("--logs", type=Path, default=OWN / "engines-logs", help="folder of the engines' logs (default .tuned/engines-logs)")
    vllm.add_argument(
        "--engine", type=json.loads, default={}, help='more keywords of vllm.LLM, as JSON: \'{"attention_backend": "TRITON_ATTN"}\''
    )
    vllm.add_argument("--json", type=Path, default=OWN / "vllm.json", help="rows are added here; cells that it holds are not run again")
    vllm.set_defaults(kind=_vllm)
    stores = kinds.add_parser("stores", help="attaching stores of 10,000 entries, and reloading an epoch of 1,000 winners on two ranks")
    stores.add_argument("stores", nargs="+", metavar="STORE", help="folders or URLs; they are left as they were")
    stores.add_argument("--entries", type=positive, default=ENTRIES, help=f"of a store that is attached (default {ENTRIES})")
    stores.add_argument("--winners", type=positive, default=WINNERS, help=f"of the epoch that is reloaded (default {WINNERS})")
    stores.add_argument("--repeats", type=positive, default=REPEATS, help=f"of each, of which the median counts (default {REPEATS})")
    stores.add_argument("--json", type=Path, help="write the table here")
    stores.set_defaults(kind=_stores)
    mixed = kinds.add_parser("soak", help="mixed traffic over a running OpenAI-compatible server: errors, latency and memory by the minute")
    mixed.add_argument("--url", default="http://127.0.0.1:8000")
    mixed.add_argument("--model", required=True, help="the served name")
    mixed.add_argument("--words", type=int, default=1000, help="token ids are drawn below this (default 1000)")
    mixed.add_argument("--seconds", type=float, default=1200.0)
    mixed.add_argument("--window-s", type=float, default=60.0)
    mixed.add_argument("--scale", type=float, default=1.0, help="of the lengths of prompts and answers, 900 tokens at most by default")
    mixed.add_argument("--most", type=int, default=soak.MOST, help=f"requests at once (default {soak.MOST})")
    mixed.add_argument("--pids", type=int, nargs="*", default=[], help="the server's processes, whose resident memory is watched")
    mixed.add_argument("--json", type=Path, help="write the table here")
    mixed.set_defaults(kind=_soak)


def run(arguments: argparse.Namespace) -> int:
    """0: what was measured holds its bars; 1: it does not, and stderr says what."""
    if arguments.kind is not _vllm or arguments.json.parent != OWN:
        require_writable(arguments.json)
    with _terminable():
        code: int = arguments.kind(arguments)
    return code


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM leaves by an exception, as an interrupt does: what was put into stores is removed, and no process is left. A second one
    does not wait for that."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        hurry()
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit as ended:
        if ended.code == 128 + signal.SIGTERM:
            note(f"moe-dist: ended by {signal.SIGTERM.name}")  # not in `end`, which may have come amid a line on stderr
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _agreement(arguments: argparse.Namespace) -> int:
    if arguments.faults:
        find_binary()  # before minutes are spent
    diverged = diverged_table(arguments.ranks, arguments.keys, arguments.calls, note)
    objections = report.diverged_objections(diverged, arguments.ranks, arguments.keys, arguments.calls)
    tables = {"divergence": diverged}
    if arguments.faults:
        tables["faults"] = fault_table(note=note)
        objections += report.fault_objections(tables["faults"])
    command = f"moe-dist bench agreement --ranks {shlex.join(map(str, arguments.ranks))} --keys {arguments.keys} --calls {arguments.calls}"
    return _finish(arguments.json, command + (" --faults" if arguments.faults else ""), tables, objections)


def _lookup(arguments: argparse.Namespace) -> int:
    rows = lookup_table()
    return _finish(arguments.json, "moe-dist bench lookup", {"lookup": rows}, report.lookup_objections(rows))


def _scaling(arguments: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        url = arguments.redis
        if url is not None:
            if odd := [count for count in arguments.clients if count % 2]:
                raise ConfigError(f"--clients {odd[0]}: two processes ask, each with half of the clients; take an even number")
            if url == OWN_SERVER:
                url = f"redis://127.0.0.1:{stack.enter_context(RedisServer()).port}/0"
            _require_server(url)
            require_room(url, arguments.clients)
        if (arguments.ranks, arguments.keys) == (list(RANKS), list(KEYS)):
            note("these ranks and keys take over a minute; fewer --ranks and --keys take less")
        tables, lost = {"scaling": scaling_table(arguments.ranks, arguments.keys, note)}, None
        if url is not None:
            tables["servers"], lost = _until_lost(servers_table(url, arguments.clients, note=note))
        return _finish(arguments.json, "moe-dist bench scaling" + (" --redis redis" if url is not None else ""), tables, [], lost)


def _until_lost(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """(those that could be measured, why no more could; None: all could). StoreError: it could not even begin."""
    measured: list[dict[str, Any]] = []
    try:
        with quiet_stores():
            for row in rows:
                measured.append(row)
    except (ServerLost, StoreError) as error:
        if isinstance(error, StoreError) and not measured:
            raise
        return measured, str(error)
    return measured, None


def _require_server(url: str) -> None:
    """StoreError: no server answers at `url`, which is asked last, after a minute."""
    address = RedisAddress.parse(url)
    if address.kind or address.tls or address.path or address.password:
        raise StoreError("--redis: name one server, without TLS or a password: redis://HOST:PORT")
    store = open_store(url)
    try:
        with quiet_stores():
            store.get("bench/none")
        require_reached(store)
    finally:
        store.close()


def _vllm(arguments: argparse.Namespace) -> int:
    count = 3 if arguments.control else 2
    if not 0 < arguments.memory * count <= 1:
        words = f"{'three' if arguments.control else 'two'} engines live on a card at once, so each may take {1 / count:.2f} of it at most"
        raise ConfigError(f"--memory {arguments.memory:g}: {words}; take less, and fewer --layers where they do not fit then")
    if arguments.logs.parent != OWN:
        require_folder_of(arguments.logs, "--logs")
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}, which would start the engines; run this by the Python of one that has it"
        )
    if max(arguments.cards) >= (seen := torch.cuda.device_count()):
        cards = " ".join(map(str, arguments.cards))
        raise ConfigError(
            f"--cards {cards}: torch sees {counted(seen, 'GPU')} here, {'counted from 0' if seen else 'and the engines need one'}"
        )
    if arguments.json.parent == OWN:
        with contextlib.suppress(OSError):  # said next
            OWN.mkdir(exist_ok=True)
        require_writable(arguments.json)
    asked = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(engines.Plan) if field.name in arguments}
    plan = engines.Plan(process=[sys.executable, "-m", "moe_dist_vllm.bench"], keywords=arguments.engine, **asked)
    ledger = engines.Ledger(arguments.json)
    failures = engines.measure(plan, ledger, lambda line: note(f"[{time.strftime('%H:%M:%S')}] {line}"))
    objections = [
        line
        for experts in plan.experts
        for line in engines.engine_objections(
            ledger.tables, plan.dtypes, plan.modes, plan.batches, plan.tp, plan.tp if experts == "shared" else 1
        )
    ]
    for line in [*failures, *objections]:
        print(f"moe-dist bench: {line}", file=sys.stderr)
    return 1 if failures or objections else 0


def _stores(arguments: argparse.Namespace) -> int:
    sizes = {"entries": ENTRIES, "winners": WINNERS, "repeats": REPEATS}
    asked = {name: getattr(arguments, name) for name in sizes}
    rows, lost = _until_lost(stores_table(arguments.stores, **asked, note=note))
    counts = {"attach": asked["entries"], "reload": asked["winners"], "first reload": asked["winners"]}
    if (asked["entries"], asked["winners"]) != (ENTRIES, WINNERS):
        note(f"the bars are of {ENTRIES} entries and {WINNERS} winners")
    kinds = list(dict.fromkeys(str(row["store"]) for row in rows))  # where they lie is nobody's business
    command = shlex.join(
        ["moe-dist", "bench", "stores", *kinds, *(f"--{name}={asked[name]}" for name in sizes if asked[name] != sizes[name])]
    )
    return _finish(arguments.json, command, {"stores": rows}, [] if lost else report.store_objections(rows, kinds, counts), lost)


def _soak(arguments: argparse.Namespace) -> int:
    traffic = soak.Traffic(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(soak.Traffic)})
    rows, lost = _until_lost(soak.soak(traffic, note))
    command = f"moe-dist bench soak --model {traffic.model} --seconds {traffic.seconds:g}"
    return _finish(arguments.json, command, {"soak": rows}, [] if lost else soak.soak_objections(rows), lost)


def _finish(
    path: Path | None, command: str, tables: dict[str, list[dict[str, Any]]], objections: list[str], lost: str | None = None
) -> int:
    """lost: why the last of `tables` is not whole, nor are those which would follow."""
    if lost is not None:
        rows = counted(sum(map(len, tables.values())), "row")
        kept = f"{rows} before it {'are' if rows != '1 row' else 'is'} {f'in {path}' if path is not None else 'shown'}"
        objections = [f"{lost}; {kept}; see that it runs, then run this again", *objections]
    if path is not None:  # first: whoever reads the tables may stop before their end
        report.write(path, report.document(command, tables) | ({"incomplete": lost} if lost is not None else {}))
    for title, table in tables.items():
        report.show(title, table)
    for objection in objections:
        print(f"moe-dist bench: {objection}", file=sys.stderr)
    return 1 if objections else 0
