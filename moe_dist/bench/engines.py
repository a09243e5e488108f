"""Served speed, moe_dist against a serving engine's own choice: two engines live on one card, asked in turns, a ratio a pair.

Owns the order of starts and questions, the rows and their bars. Knows no framework: an engine is a process that answers JSON lines
(`moe_dist_vllm/bench.py` is one). cli imports this.

On a card one engine starts at a time and nothing is asked meanwhile, so that tuning and memory profiling see a quiet card. The engines of a
card have the same cores, which no other card's have: where a step waits for the host, other cores are another speed. Rows are written as they
come, and a cell that the file holds is not measured again: a run that is cut is continued by the same command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_dist.bench.server import dies_with_parent

BACKENDS = ("auto", "moe_dist")  # in the order of their starts: what stock compiles is no cost of ours
CONTROL = "control"  # a second stock engine: what two equal ones differ by
WARM_UPS = 2
TRUTH = "truth"  # an fp8 model's numbers in bf16, in stock vLLM
PROMPT, MOST_TOKENS = 128, 8192
# Short answers and many pairs: a shared host's speed moves by the second, and a pair must be asked inside one of its moods. By batch in
# graphs, 48 for others. An eager step is the host's alone, whose moods spread equal pairs by a third: 100 of them tell 7% apart.
NEW_TOKENS, EAGER_NEW_TOKENS = {1: 64, 32: 64}, 8
PAIRS = {"cuda_graph": 20, "eager": 100}
# The bars. A cell of two equal engines is 1: no interval may lie below SLOWEST; where a profile shows the MoE layers to be HALF of the
# time, the mean is above FASTER. Our own tactics serve over HALF of the MoE time of a dtype; KV tokens, and seconds of a first tuning.
LEAST_PAIRS, SLOWEST, FASTER, HALF, LEAST_KV, MOST_TUNING_S = 5, 0.98, 1.05, 0.5, 0.99, 120.0

# Qwen3-30B-A3B with fewer layers, and fewer words in proportion, so that the layers keep their share of the device's time. With too few of
# them a step in graphs waits for the host (12 layers do on an H200, up to a batch of 256), which the whole model does not.
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
ALL_LAYERS, ALL_WORDS = 48, 151_936

Place = Mapping[str, Any]  # dtype, mode, tp, ep: what two engines have in common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure and how.

    process: the command of an engine's process, which gets a JSON spec as its last argument. cards: indices of the cards; the dtypes are
    shared out over them, or all of them serve one engine (tp > 1). pairs: of a cell, by mode as PAIRS says if None. model: a folder to serve instead of SHAPE, its weights as stored.
    experts: how tp ranks hold them: each one "cut", or "shared" out (expert parallel). control: a third
    engine, stock like the second, so that a row says what two equal ones differ by. memory: the share of a card that one engine may take. workers: how the engine's core is made: "fork", "spawn" or "inside" its process. store: of moe_dist's winners; logs: a folder. keywords: more of the engine's own.
    """

    process: Sequence[str]
    dtypes: Sequence[str] = ("bf16", "fp8")
    modes: Sequence[str] = ("cuda_graph", "eager")
    batches: Sequence[int] = (1, 32, 256)
    pairs: int | None = None
    cards: Sequence[int] = (0,)
    tp: int = 1
    experts: Sequence[str] = ("cut",)
    layers: int = 36
    model: Path | None = None
    control: bool = False
    memory: float = 0.45
    workers: str = "fork"
    budget_s: float = 120.0
    store: Path = Path(".tuned/engines")
    logs: Path = Path(".tuned/engines-logs")
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class EngineFailed(RuntimeError):
    """An engine said that it failed, ended, or was silent past its deadline; the message has the end of its log."""


class Engine:
    """One engine's process, on `cores`, and all that it starts; it dies with the thread that makes this. Its spec: {"backend", "keywords", "draw", "settings", "environment"}."""

    def __init__(self, process: Sequence[str], spec: Mapping[str, Any], log: Path, cores: Sequence[int]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                dies_with_parent([*process, json.dumps(spec)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, cores)  # long before it has threads
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._loaded = False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, deadline: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=deadline)
        except queue.Empty:
            raise EngineFailed(f"no answer in {deadline:g} s\n{self.tail()}") from None
        if line is None:
            raise EngineFailed(f"it ended\n{self.tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.tail()}")
        return answer

    def ask(self, what: str, deadline: float, **arguments: Any) -> Any:
        """The answer to one question. EngineFailed: it gave none."""
        if not self._loaded:
            self._answer(300)
            self._loaded = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer(deadline)["answer"]

    def tail(self, lines: int = 60) -> str:
        """The end of its log, and every line before that names an error."""
        text = self.log.read_text(errors="replace").splitlines()
        named = [line for line in text[:-lines] if "Error" in line or "ERROR" in line or "WARNING" in line]
        return "\n".join([*named[-20:], *text[-lines:]])

    def close(self) -> None:
        """End it and whatever it started."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write('{"do": "end"}\n')
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Ledger:
    """Tables of rows in one JSON file, which is whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.tables: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, table: str, **fields: Any) -> Mapping[str, Any] | None:
        return _find(self.tables.get(table, ()), fields)

    def add(self, table: str, row: dict[str, Any]) -> None:
        with self._lock:
            self.tables.setdefault(table, []).append(row)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            parts = [f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in self.tables.items()]
            part.write_text("{\n" + ",\n".join(parts) + "\n}\n")
            part.replace(self._path)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the 95% interval of the median that needs no distribution, two order statistics of at least 5 ratios.

    A moment in which the host did something else spoils a pair, and no interval of more than 8. With 5 it is the whole range, at 94%.
    """
    ordered, count = sorted(ratios), len(ratios)
    if count < LEAST_PAIRS:
        return statistics.median(ordered), ordered[0], ordered[-1]
    below, out = 0.0, 0  # how many order statistics may be left out at each end: their tail is at most 2.5%
    while (below := below + math.comb(count, out) / 2**count) <= 0.025:
        out += 1
    cut = max(0, out - 1)
    return statistics.median(ordered), ordered[cut], ordered[count - 1 - cut]


def _new_tokens(place: Place, batch: int) -> int:
    return EAGER_NEW_TOKENS if place["mode"] == "eager" else NEW_TOKENS.get(batch, 48)


def engine_objections(
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    dtypes: Sequence[str],
    modes: Sequence[str],
    batches: Sequence[int],
    tp: int = 1,
    ep: int = 1,
) -> list[str]:
    """What is missing in the tables of one layout, or below its bar.

    FASTER is asked for where the MoE layers are HALF of the stock engine's device time, as a profile shows it, also where a step waits for its
    host and is no shorter for faster kernels (`moe_time_share` is of the time between two tokens): layers that are a share s of that time and
    become r times as fast make a step 1 / (1 - s + s / r) times as fast at most.
    """
    found = []
    layout = {"tp": tp, "ep": ep}
    for dtype in dtypes:
        spent = own = 0.0
        for mode, batch in itertools.product(modes, batches):
            where = f"{dtype} {mode} batch {batch} tp {tp} ep {ep}"
            place = {"dtype": dtype, "mode": mode, "batch": batch, **layout}
            cell, profile = _find(tables.get("cells", ()), place), _find(tables.get("profiles", ()), {**place, "backend": "auto"})
            if cell is None:
                found.append(f"no row for {where}")
                continue
            share = 0.0 if profile is None else profile.get("moe_share") or 0.0
            if cell["pairs"] < LEAST_PAIRS:
                found.append(f"{where}: {cell['pairs']} pairs, fewer than {LEAST_PAIRS}")
            for name in ("throughput", "latency"):
                if f"{name}_ratio" not in cell:
                    found.append(f"{where}: no {name}")
                    continue
                ratio, (low, high) = cell[f"{name}_ratio"], cell[f"{name}_interval"]
                if low < SLOWEST:
                    found.append(f"{where}: {name} {ratio} with an interval from {low} to {high}, below {SLOWEST}")
                if share >= HALF and ratio <= FASTER:
                    found.append(f"{where}: {name} {ratio}, not above {FASTER} though the MoE layers are {share} of the time")
            if profile is None or "moe_share" not in profile:
                found.append(f"{where}: no profile{': ' + str(profile['error']) if profile else ''}")
            if cell["kv_tokens"] < LEAST_KV * cell["kv_tokens_auto"]:
                found.append(f"{where}: {cell['kv_tokens']} KV tokens beside {cell['kv_tokens_auto']}, below {LEAST_KV} of them")
            if cell["tuning_seconds"] > MOST_TUNING_S or not cell["tuned"]:
                found.append(
                    f"{where}: tuning took {cell['tuning_seconds']} s for {cell['tuned']} candidates; the bar is {MOST_TUNING_S:g} s, cold"
                )
            spent, own = spent + cell["moe_us"], own + cell["moe_us"] * cell["own_time_share"]
        if spent and own <= HALF * spent:
            found.append(f"{dtype} tp {tp} ep {ep}: our own tactics serve {own / spent:.2f} of the MoE time, not over {HALF}")
    found += [
        f"{start['dtype']} {start['mode']} tp {tp} ep {ep}: ranks serve different epochs: {', '.join(start['epochs'])}"
        for start in tables.get("starts", ())
        if {name: start[name] for name in layout} == layout and not start["alike"]
    ]
    return found


def _find(rows: Sequence[Mapping[str, Any]], place: Place) -> Mapping[str, Any] | None:
    return next((row for row in rows if all(row.get(name) == value for name, value in place.items())), None)


def write_model(folder: Path, dtype: str, layers: int) -> Path:
    """config.json of SHAPE with `layers` layers; fp8: the experts in 128 x 128 blocks, all else in bf16."""
    config: dict[str, Any] = SHAPE | {"num_hidden_layers": layers, "vocab_size": max(1024, ALL_WORDS * layers // ALL_LAYERS // 64 * 64)}
    if dtype == "fp8":
        dense = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in
                 ("mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))]  # fmt: skip
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": [*dense, "lm_head"],
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(plan: Plan, ledger: Ledger, note: Callable[[str], None]) -> list[str]:
    """Measure what `ledger` lacks; what failed, a line each. Tables: "starts" (a row an engine), "cells", "profiles" (a row a cell and engine),
    "tokens" and "errors" (a row a place)."""
    failures: list[str] = []

    def serve(dtypes: Sequence[str], cards: Sequence[int]) -> None:
        for dtype in dtypes:
            places = [place for place in _places(plan, dtype) if _missing(plan, place, ledger)]
            with _engines(plan, dtype, cards, places) as engines:
                for place, both in zip(places, engines, strict=True):
                    try:
                        _place(plan, place, both, cards, ledger, note)
                    except Exception as error:  # the others can still be measured
                        failures.append(f"{place} on {list(cards)}: {type(error).__name__}: {error}")
                        note(failures[-1])
                    for engine in both.values():
                        engine.close()

    if plan.tp > 1:
        serve(plan.dtypes, plan.cards)
        return failures
    threads = [
        threading.Thread(target=serve, args=(plan.dtypes[index :: len(plan.cards)], [card])) for index, card in enumerate(plan.cards)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def _places(plan: Plan, dtype: str) -> list[Place]:
    return [
        {"dtype": dtype, "mode": mode, "tp": plan.tp, "ep": plan.tp if experts == "shared" else 1}
        for experts, mode in itertools.product(plan.experts, plan.modes)
    ]


def _missing(plan: Plan, place: Place, ledger: Ledger) -> bool:
    cells = [ledger.find("cells", **place, batch=batch) for batch in plan.batches]
    profiles = [ledger.find("profiles", **place, batch=batch, backend=backend) for batch in plan.batches for backend in BACKENDS]
    return None in cells or None in profiles or (plan.model is None and ledger.find("errors", **place) is None)


def _place(
    plan: Plan, place: Place, engines: Mapping[str, Engine], cards: Sequence[int], ledger: Ledger, note: Callable[[str], None]
) -> None:
    """Start the engines of a place, one after the other, and fill its rows."""
    starts = {}
    for backend, engine in engines.items():
        started = engine.ask("start", 420)
        workers = started["workers"]
        start = {**place, "backend": backend, "seconds": started["seconds"], **workers[0]}
        start["epochs"] = sorted({worker["epoch"] for worker in workers if "epoch" in worker})
        start["alike"] = len({worker.get("epoch") for worker in workers}) == 1
        starts[backend] = start
        ledger.add("starts", start)
        note(_said(start))
    both = {backend: engines[backend] for backend in BACKENDS}
    _tokens(both, place, ledger, note)
    for batch in plan.batches:
        if ledger.find("cells", **place, batch=batch) is None:
            row = {**place, "batch": batch, **_cell(plan, place, engines, batch), **_of_start(ledger, place, starts)}
            ledger.add("cells", row)
            note(json.dumps(row))
    for batch, backend in itertools.product(plan.batches, BACKENDS):  # last: a profiler leaves traces in what is timed after it
        if ledger.find("profiles", **place, batch=batch, backend=backend) is None:
            profile = engines[backend].ask("profile", 240, batch=batch, prompt=PROMPT, new=_new_tokens(place, batch) // 2)
            row = {**place, "batch": batch, "backend": backend, **profile}
            ledger.add("profiles", row)
            note(f"profile {json.dumps(row)}")
    if CONTROL in engines:
        engines[CONTROL].close()
    _errors(plan, both, place, cards, ledger, note)


def _of_start(ledger: Ledger, place: Place, starts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a cell's row says of its engines. tuning_seconds: of the first start, which found no winners."""
    ours = starts["moe_dist"]
    own = [bucket["own"] for bucket in ours["buckets"]]
    first = ledger.find("starts", **place, backend="moe_dist") or ours
    return {
        "own_bucket_share": round(sum(own) / len(own), 4), "tuning_seconds": first["tuning_seconds"], "tuned": first["measured"],
        "kv_tokens": ours["kv_tokens"], "kv_tokens_auto": starts["auto"]["kv_tokens"],
    }  # fmt: skip


@contextlib.contextmanager
def _engines(plan: Plan, dtype: str, cards: Sequence[int], places: Sequence[Place]) -> Iterator[list[dict[str, Engine]]]:
    """The processes of all places, by backend, loaded at once and not yet started."""
    engines: list[dict[str, Engine]] = []
    model = plan.model or write_model(plan.logs / f"model-{dtype}-{plan.layers}", dtype, plan.layers)
    try:
        for place in places:
            name = f"{dtype}-{place['mode']}-tp{place['tp']}-ep{place['ep']}"
            both = {
                backend: Engine(
                    plan.process, _spec(plan, model, place, backend, cards), plan.logs / f"{name}-{backend}.log", _cores(plan, cards)
                )
                for backend in (*BACKENDS, *([CONTROL] if plan.control else []))
            }
            engines.append(both)
        yield engines
    finally:
        for both in engines:
            for engine in both.values():
                engine.close()


def _cores(plan: Plan, cards: Sequence[int]) -> list[int]:
    """Of this process, those for the engines of `cards`: a part in a row for each card of the plan, all where the cards serve together."""
    cores = sorted(os.sched_getaffinity(0))
    if plan.tp > 1 or len(cores) < len(plan.cards):
        return cores
    part, index = len(cores) // len(plan.cards), list(plan.cards).index(cards[0])
    return cores[index * part : (index + 1) * part]


def _spec(plan: Plan, model: Path, place: Place, backend: str, cards: Sequence[int]) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "model": str(model.resolve()), "enforce_eager": place["mode"] == "eager", "gpu_memory_utilization": plan.memory, "max_model_len": 1024,
        "max_num_batched_tokens": MOST_TOKENS, "max_num_seqs": 256, "tensor_parallel_size": plan.tp, "enable_expert_parallel": place["ep"] > 1,
        **({} if plan.model else {"load_format": "dummy"}), **plan.keywords,
    }  # fmt: skip
    return {
        "backend": "moe_dist" if backend == "moe_dist" else "auto",
        "keywords": keywords,
        "draw": plan.model is None,
        "settings": {"store": str(plan.store.resolve()), "budget_s": plan.budget_s} if backend == "moe_dist" else {},
        "environment": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if plan.workers == "inside" else "1",
                        "VLLM_WORKER_MULTIPROC_METHOD": "fork" if plan.workers == "inside" else plan.workers, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                        "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    }  # fmt: skip


def _cell(plan: Plan, place: Place, engines: Mapping[str, Engine], batch: int) -> dict[str, Any]:
    """One cell's row: interleaved pairs, then what a step costs the host, and the share of the MoE layers by their own time."""
    new = _new_tokens(place, batch)
    question = {"batch": batch, "prompt": PROMPT, "new": new}
    for _ in range(WARM_UPS):
        for engine in engines.values():
            engine.ask("generate", 300, **question)
    pairs: list[dict[str, dict[str, float]]] = []
    for index in range(plan.pairs or PAIRS[place["mode"]]):
        order = list(engines)[::-1] if index % 2 else list(engines)
        pairs.append({backend: engines[backend].ask("generate", 300, **question) for backend in order})
    row: dict[str, Any] = {"pairs": len(pairs)}
    for name, field, inverse in (("throughput", "tokens_per_s", False), ("latency", "itl_us", True)):
        values = {backend: [pair[backend][field] for pair in pairs] for backend in BACKENDS}
        if any(value is None for backend in BACKENDS for value in values[backend]):
            continue
        ratios = [(stock / ours) if inverse else (ours / stock) for ours, stock in zip(values["moe_dist"], values["auto"], strict=True)]
        mean, low, high = interval(ratios)
        row |= {f"{name}_ratio": round(mean, 4), f"{name}_interval": [round(low, 4), round(high, 4)]}
        row[f"{name}_ratios"] = [round(ratio, 4) for ratio in ratios]
        if plan.control:
            equal = [pair["auto"][field] / pair[CONTROL][field] for pair in pairs]
            row[f"{name}_control"] = [round(value, 4) for value in interval(equal)]
        row |= {field: round(statistics.median(values["moe_dist"]), 1), f"{field}_auto": round(statistics.median(values["auto"]), 1)}
    row |= {f"host_{backend}": engines[backend].ask("host", 300, **question) for backend in BACKENDS}
    row |= _moe_share(plan, engines, batch, new, row)
    return row


def _moe_share(plan: Plan, engines: Mapping[str, Engine], batch: int, new: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """moe_time_share: of a step of the stock engine, by its layers' own time. own_time_share: of the MoE time of the whole answer, prefill included, in calls that our own tactics serve."""
    largest = int(plan.keywords.get("max_num_batched_tokens", MOST_TOKENS))
    prefill = [min(largest, batch * PROMPT - done) for done in range(0, batch * PROMPT, largest)]
    counts = sorted({batch, *prefill})
    ours = {answer["tokens"]: answer for answer in engines["moe_dist"].ask("moe_us", 180, counts=counts)}
    stock = engines["auto"].ask("moe_us", 180, counts=[batch])[0]
    steps = [ours[batch]] * (new - 1) + [ours[count] for count in prefill]
    found: dict[str, Any] = {
        "moe_us": ours[batch]["us"], "moe_us_auto": stock["us"], "launch_us": ours[batch].get("launch_us"), "launch_us_auto": stock.get("launch_us"),
        "tactic": ours[batch].get("tactic"),
        "own_time_share": round(sum(step["us"] for step in steps if step["own"]) / sum(step["us"] for step in steps), 4),
    }  # fmt: skip
    if row.get("itl_us_auto"):
        found["moe_time_share"] = round(stock["us"] / row["itl_us_auto"], 4)
    return found


def _tokens(engines: Mapping[str, Engine], place: Place, ledger: Ledger, note: Callable[[str], None]) -> None:
    """How far the two engines' greedy tokens agree: rounding parts them sooner or later, a wrong layer at once."""
    said = {name: engine.ask("generate", 300, batch=8, prompt=PROMPT, new=16, keep=True)["tokens"] for name, engine in engines.items()}
    alike = [next((i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b), 16) for rows in zip(*said.values(), strict=True)]
    row = {
        **place,
        "first_equal": sum(n > 0 for n in alike),
        "of": len(alike),
        "mean_prefix": statistics.fmean(alike),
        "distinct": len({str(r) for r in said["auto"]}),
    }
    row["executed"] = engines["moe_dist"].ask("report", 60)[0]["executed"]
    ledger.add("tokens", row)
    note(f"tokens: {json.dumps(row)}; moe_dist {said['moe_dist'][0][:10]}, auto {said['auto'][0][:10]}")


def _errors(
    plan: Plan, engines: Mapping[str, Engine], place: Place, cards: Sequence[int], ledger: Ledger, note: Callable[[str], None]
) -> None:
    """How far each engine is from the truth: its first MoE layer from fp32 on the weights' meaning, and for fp8 the model's logits from
    those of another engine that serves the same numbers in bf16 when these are closed. Of the place's first run alone."""
    if plan.model is not None or ledger.find("errors", **place) is not None:
        return
    counts = [1, 32, 256, 4096]
    row: dict[str, Any] = {**place, "tokens": counts}
    for backend, engine in engines.items():
        row[f"layer_{backend}"] = [answer["error"] for answer in engine.ask("moe_error", 120, counts=counts)]
    if place["dtype"] == "fp8" and plan.tp == 1:
        model = write_model(plan.logs / f"model-bf16-{plan.layers}", "bf16", plan.layers)
        spec = _spec(plan, model, {**place, "mode": "eager"}, "auto", cards) | {"draw": "dequantised"}
        logits = {name: engine.ask("logits", 120, batch=8, prompt=PROMPT) for name, engine in engines.items()}
        for engine in engines.values():  # the truth takes twice the memory of one of them
            engine.close()
        truth = Engine(plan.process, spec, plan.logs / f"{TRUTH}-{place['mode']}.log", _cores(plan, cards))
        try:
            truth.ask("start", 420)
            logits[TRUTH] = truth.ask("logits", 120, batch=8, prompt=PROMPT)
        finally:
            truth.close()
        for backend in engines:
            row[f"logits_{backend}"], row[f"first_{backend}"] = _apart(logits[backend], logits[TRUTH])
    ledger.add("errors", row)
    note(f"errors: {json.dumps(row)}")


def _apart(found: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(root mean square of the differences over the deviation of the truth, share of rows whose largest is at the same place)."""
    pairs = list(zip(found, truth, strict=True))
    off = statistics.fmean((a - b) ** 2 for row, right in pairs for a, b in zip(row, right, strict=True))
    deviation = statistics.pstdev([value for right in truth for value in right])
    alike = statistics.fmean(
        max(range(len(row)), key=row.__getitem__) == max(range(len(right)), key=right.__getitem__) for row, right in pairs
    )
    return round(math.sqrt(off) / deviation, 5), round(alike, 4)


def _said(start: Mapping[str, Any]) -> str:
    lines = [
        f"start {start['dtype']} {start['mode']} tp{start['tp']} ep{start['ep']} {start['backend']}: up in {start['seconds']} s, experts {start['experts']} "
        f"in {start['layers']} layers, KV {start['kv_tokens']} tokens"
    ]
    if "epoch" in start:
        own = [bucket["own"] for bucket in start["buckets"]]
        lines.append(
            f"  tuned in {start['tuning_seconds']} s, {start['measured']} timed, epochs {start['epochs']} alike {start['alike']}, own tactics in "
            f"{sum(own)} of {len(own)} buckets, executed {start['executed']}"
        )
        lines += [f"  {line}" for line in start["lines"]]
    return "\n".join(lines)
