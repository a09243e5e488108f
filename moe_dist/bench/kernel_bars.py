"""What the rows of `moe-dist bench kernels` come to: tables of ratios, the bars that hold and those that don't, and what is missing.

Owns the form of docs/evidence/kernels-h200.json, how parts of it are merged, and the reasons to refuse one. Times nothing. cli and tests
import this. Ratios are the peer's time over ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_dist.bench.kernel_inputs import ROUTINGS
from moe_dist.bench.kernels import Plan, is_whole, ladder_of, row_key
from moe_dist.bench.peers import DEEP_GEMM_TOKENS, SONICMOE_TOKENS
from moe_dist.errors import ConfigError

VLLM = ("vllm_triton", "vllm_deepgemm")
SGLANG = "sglang_triton"
SONICMOE, SONICMOE_FROM = "sonicmoe", 4096
LEAST_RATIO = 0.98
MEAN_RATIO = {"bf16": 1.20, "fp8": 1.25}
ONE_TOKEN_RATIO = 1.3
FLOOR_RATIO = {"bf16": 1.15, "fp8": 1.25}
FLOOR_TOKENS = (4, 256)
SONICMOE_RATIO = 0.95
HOST_US = 60.0
COLD_S, WARM_S = 90.0, 5.0
# Both errors come from the same two dozen rows: closer than this they are equal.
ERROR_TIE = 1.02

Rows = Sequence[Mapping[str, Any]]
GRAPH_FIELDS = (
    "peer_us", "ours_us", "floor_us", "ratio", "peer_spread_us", "ours_spread_us", "tactic", "ours_error", "peer_error", "same_bits"
)  # fmt: skip
EAGER_FIELDS = (*GRAPH_FIELDS, "peer_host_us", "ours_host_us", "calls")
TUNING_FIELDS = ("buckets", "candidates", "kernels", "cold_s", "warm_s", "stored_s")


@dataclasses.dataclass(frozen=True)
class Bar:
    """One promise and what was measured. holds None: nothing in the rows judges it."""

    name: str
    limit: str
    value: float | None
    holds: bool | None
    where: str = ""

    def __str__(self) -> str:
        said = {True: "holds", False: "does not hold", None: "not measured"}[self.holds]
        return f"{self.name}: {said}" + (
            f" ({self.value:.3g}, bar {self.limit}{', ' + self.where if self.where else ''})" if self.value is not None else ""
        )


def bars(rows: Rows, tuning: Rows) -> list[Bar]:
    """The bars of our kernels, over whatever cells there are; those against SGLang only where it was a peer: it stands in a table of its own."""
    found = []
    for dtype in sorted({row["dtype"] for row in rows}):
        best = best_peers(rows, dtype, "cuda_graph", VLLM)
        ratios = {cell: row["ratio"] for cell, row in best.items()}
        found.append(_least(f"{dtype}: every graph cell against vLLM's best", ratios, LEAST_RATIO))
        found.append(_mean(f"{dtype}: geometric mean over the graph cells", ratios.values(), MEAN_RATIO[dtype]))
        found.append(_mean(f"{dtype}: geometric mean at one token", [r for (_, m), r in ratios.items() if m == 1], ONE_TOKEN_RATIO))
        over = [
            row["ours_us"] / row["floor_us"] for (_, m), row in best.items() if FLOOR_TOKENS[0] <= m <= FLOOR_TOKENS[1] and row["floor_us"]
        ]
        mean = geometric_mean(over)
        limit = FLOOR_RATIO[dtype]
        found.append(
            Bar(
                f"{dtype}: over the floor, {FLOOR_TOKENS[0]} to {FLOOR_TOKENS[1]} tokens, geometric mean",
                f"at most {limit}",
                mean,
                None if mean is None else mean <= limit,
            )
        )
        hosts = {
            row["shape"]: row["ours_host_us"]
            for row in rows
            if (row["dtype"], row["mode"], row["tokens"]) == (dtype, "eager", 1) and "ours_host_us" in row
        }
        found.append(_most(f"{dtype}: host time of an eager call at one token", hosts, HOST_US, "us"))
        errors = error_objections([row for row in rows if row["dtype"] == dtype])
        judged = [row for row in rows if row["dtype"] == dtype and "ours_error" in row]
        found.append(
            Bar(
                f"{dtype}: errors no larger than the peers'",
                "0 cells",
                float(len(errors)) if judged else None,
                not errors if judged else None,
                "; ".join(errors[:3]),
            )
        )
        if against := {cell: row["ratio"] for cell, row in best_peers(rows, dtype, "cuda_graph", (SGLANG,)).items()}:
            found.append(_least(f"{dtype}: every graph cell against SGLang", against, LEAST_RATIO))
            found.append(_mean(f"{dtype}: geometric mean against SGLang", against.values(), MEAN_RATIO[dtype]))
        counts = {row["tokens"] for row in rows if row["dtype"] == dtype}
        whole = [row for row in tuning if is_whole(row, row["shape"], dtype, counts)]  # a shorter ladder proves nothing
        for name, limit in (("cold", COLD_S), ("warm", WARM_S)):
            times = {row["shape"]: row[f"{name}_s"] for row in whole}
            found.append(_most(f"{dtype}: tuning a whole ladder, kernels {name}", times, limit, "s"))
    sonic = {cell: row["ratio"] for cell, row in best_peers(rows, "bf16", "cuda_graph", (SONICMOE,)).items() if cell[1] >= SONICMOE_FROM}
    found.append(_least(f"bf16: every graph cell of {SONICMOE_FROM} tokens and more against SonicMoE", sonic, SONICMOE_RATIO))
    return found


def _least(name: str, ratios: Mapping[tuple[str, int], float], limit: float) -> Bar:
    if not ratios:
        return Bar(name, f"at least {limit}", None, None)
    (shape, tokens), least = min(ratios.items(), key=lambda pair: pair[1])
    below = sum(ratio < limit for ratio in ratios.values())
    return Bar(name, f"at least {limit}", least, not below, f"{shape} at {tokens}; {below} of {len(ratios)} cells below")


def _most(name: str, values: Mapping[str, float], limit: float, unit: str) -> Bar:
    if not values:
        return Bar(name, f"under {limit:g} {unit}", None, None)
    where, most = max(values.items(), key=lambda pair: pair[1])
    return Bar(name, f"under {limit:g} {unit}", most, most < limit, where)


def _mean(name: str, ratios: Iterable[float], limit: float) -> Bar:
    mean = geometric_mean(ratios)
    return Bar(name, f"at least {limit}", mean, None if mean is None else mean >= limit)


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def best_peers(rows: Rows, dtype: str, mode: str, peers: Sequence[str]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """{(shape, tokens): the row of the fastest of `peers`} of the cells that were timed."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        if (row["dtype"], row["mode"]) != (dtype, mode) or row["peer"] not in peers or "ratio" not in row:
            continue
        cell = (row["shape"], row["tokens"])
        if cell not in found or row["ratio"] < found[cell]["ratio"]:
            found[cell] = row
    return found


def error_objections(rows: Rows) -> list[str]:
    """Rows whose error on some routing is above the peer's."""
    found = []
    for row in rows:
        for routing in ROUTINGS:
            ours, peer = row.get("ours_error", {}).get(routing), row.get("peer_error", {}).get(routing)
            if ours is not None and peer is not None and not ours <= ERROR_TIE * peer:
                found.append(f"{_where(row)}: {routing}: error {ours:.3g}, {row['peer']}'s is {peer:.3g}")
    return found


def objections(rows: Rows, tuning: Rows, plan: Plan, able: Mapping[str, Sequence[str]]) -> list[str]:
    """What is missing or wrong in a table. able: {peer: dtypes that it is timed in}, peers that begin at some token count from there on.

    A bar that does not hold is no objection: `bars` tells.
    """
    found = []
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        if (key := row_key(row)) in seen:
            found.append(f"two rows for {' '.join(map(str, key))}")
        seen.add(key)
        if "reason" in row:
            found.append(f"{_where(row)}: {row['peer']} was not timed: {row['reason']}")
            continue
        fields = GRAPH_FIELDS if row["mode"] == "cuda_graph" else EAGER_FIELDS
        found += [f"{_where(row)}: {row['peer']}: no field {name}" for name in fields if name not in row]
        if row.get("fault"):
            found.append(f"{_where(row)}: {row['fault']}")
        if row.get("same_bits") is False:
            found.append(f"{_where(row)}: {row['tactic']} gave other bits at its second run")
        if {"ratio", "ours_us", "peer_us"} <= row.keys() and abs(row["ratio"] * row["ours_us"] / row["peer_us"] - 1) > 0.001:
            found.append(f"{_where(row)}: ratio {row['ratio']} is not {row['peer_us']} over {row['ours_us']}")
    for shape, dtype, cells in plan.cells():
        for mode, count in cells:
            for peer, dtypes in able.items():
                if dtype in dtypes and count >= STARTS.get(peer, 1) and (shape.name, dtype, count, mode, peer) not in seen:
                    found.append(f"no row for {shape.name} {dtype} {count} {mode} {peer}")
        if plan.ladder:
            times = [row for row in tuning if is_whole(row, shape.name, dtype, plan.tokens)]
            if len(times) != 1:
                buckets = len(ladder_of(plan.tokens).bounds)
                found.append(f"{len(times)} rows of tuning times for {shape.name} {dtype} over its ladder of {buckets} buckets")
            found += [f"tuning {shape.name} {dtype}: no field {name}" for row in times for name in TUNING_FIELDS if name not in row]
    return found


STARTS = {"vllm_deepgemm": DEEP_GEMM_TOKENS, SONICMOE: SONICMOE_TOKENS}
_ONLY = {"vllm_deepgemm": "fp8", SONICMOE: "bf16", "torch_grouped_mm": "bf16"}


def times(peer: str, dtype: str) -> bool:
    """Whether a peer that can be had is timed in a dtype."""
    return _ONLY.get(peer, dtype) == dtype


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['shape']} {row['dtype']} {row['tokens']} {row['mode']}"


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of several: rows of the same cell must be the same. ConfigError: they differ, or the parts come from other cards or versions."""
    first = parts[0]
    rows: dict[tuple[Any, ...], Any] = {}
    tuning: dict[tuple[Any, ...], Any] = {}
    peers: dict[str, str] = {}
    for part in parts:
        require_alike(first, part)
        for row in part["kernels"]:
            if rows.setdefault(row_key(row), row) != row:
                raise ConfigError(f"two parts have different rows for {' '.join(map(str, row_key(row)))}; leave one of them out")
        for row in part["tuning"]:
            if tuning.setdefault((row["shape"], row["dtype"], row.get("buckets")), row) != row:
                raise ConfigError(f"two parts have different tuning times for {row['shape']} {row['dtype']}; leave one of them out")
        peers |= {name: said for name, said in part["peers"].items() if name not in peers or not said.startswith("missing")}
    commands = list(dict.fromkeys(command for part in parts for command in str(part["command"]).split(" && ")))
    return dict(first) | {
        "command": " && ".join(commands),
        "time": max(part["time"] for part in parts),
        "peers": peers,
        "kernels": list(rows.values()),
        "tuning": list(tuning.values()),
    }


def require_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """ConfigError: the two documents' cards or versions differ."""
    for name in ("gpu", "driver"):
        if (ours := first["machine"].get(name)) != (theirs := other["machine"].get(name)):
            raise ConfigError(
                f"rows come from {name} {theirs!r} and from {ours!r}; they can't stand in one table: use another --json FILE, or --again"
            )
    for name in ("torch", "triton"):
        if (ours := first["versions"].get(name)) != (theirs := other["versions"].get(name)):
            raise ConfigError(
                f"rows come from {name} {theirs} and from {ours}; they can't stand in one table: use another --json FILE, or --again"
            )


def tables(rows: Rows, tuning: Rows) -> str:
    """The ratio tables as Markdown: for each dtype against vLLM's best, against every other peer, over the floor; host times; tuning times."""
    parts = []
    for dtype in sorted({row["dtype"] for row in rows}):
        graph = best_peers(rows, dtype, "cuda_graph", VLLM)
        if graph:
            parts.append(f"{dtype}, graph replay: microseconds of ours, in brackets vLLM's best over ours\n\n" + _table(graph))
        for peer in sorted({row["peer"] for row in rows}):
            if peer not in VLLM and (others := best_peers(rows, dtype, "cuda_graph", (peer,))):
                parts.append(f"{dtype}, graph replay: microseconds of ours, in brackets {peer} over ours\n\n" + _table(others))
        eager = [row for row in rows if row["dtype"] == dtype and row["mode"] == "eager" and "ours_host_us" in row]
        if eager:
            lines = [
                "| shape | tokens | peer | host us, ours | host us, peer | us a call, ours | us a call, peer |",
                "|---|---|---|---|---|---|---|",
            ]
            lines += [
                f"| {row['shape']} | {row['tokens']} | {row['peer']} | {row['ours_host_us']:.1f} | {row['peer_host_us']:.1f} | {row['ours_us']:.1f} | {row['peer_us']:.1f} |"
                for row in eager
            ]
            parts.append(f"{dtype}, eager calls\n\n" + "\n".join(lines))
    if tuning:
        lines = ["| shape | dtype | buckets | candidates | kernels | cold, s | warm, s | stored, s |", "|---|---|---|---|---|---|---|---|"]
        lines += [
            f"| {row['shape']} | {row['dtype']} | {row['buckets']} | {row['candidates']} | {row['kernels']} | {row['cold_s']:.1f} | {row['warm_s']:.1f} | {row['stored_s']:.2f} |"
            for row in tuning
        ]
        parts.append("Tuning a ladder\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _table(cells: Mapping[tuple[str, int], Mapping[str, Any]]) -> str:
    shapes, counts = list(dict.fromkeys(shape for shape, _ in cells)), sorted({count for _, count in cells})
    lines = ["| | " + " | ".join(map(str, counts)) + " |", "|---" * (len(counts) + 1) + "|"]

    def text(shape: str, count: int) -> str:
        row = cells.get((shape, count))
        return "" if row is None else f"{row['ours_us']:.1f} ({row['ratio']:.2f})"

    lines += [f"| {shape} | " + " | ".join(text(shape, count) for count in counts) + " |" for shape in shapes]

    def means(title: str, value: Mapping[tuple[str, int], float]) -> str:
        columns = [geometric_mean(value[cell] for cell in value if cell[1] == count) for count in counts]
        overall = geometric_mean(value.values())
        return f"| {title}, {overall:.2f} in all | " + " | ".join("" if mean is None else f"{mean:.2f}" for mean in columns) + " |"

    lines.append(means("geometric mean of the ratios", {cell: row["ratio"] for cell, row in cells.items()}))
    floors = {cell: row["ours_us"] / row["floor_us"] for cell, row in cells.items() if row.get("floor_us")}
    if floors:
        lines.append(means("ours over the floor", floors))
    return "\n".join(lines)
