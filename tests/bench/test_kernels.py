"""The kernel benchmark on a CPU, with peers of our own: what a row holds, resuming, merging, and who is refused. Figures prove nothing here."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dist.backends.base import BoundLayer
from moe_dist.backends.reference import compute
from moe_dist.backends.torch_loop import TorchLoopConfig
from moe_dist.bench import kernel_bars, kernel_inputs, kernels
from moe_dist.bench.kernels import Plan, Shape
from moe_dist.bench.peers import Call, Peer, open_peers
from moe_dist.cli.main import main
from moe_dist.config import BackendOptions
from moe_dist.errors import ConfigError
from moe_dist.tensors import MoEActivationPack

CPU = torch.device("cpu")
TINY = Shape("tiny", 8, 2, 32, 16)
# One token and a few: a call that rotates 16 inputs, and one whose experts get several rows each.
PLAN = Plan(
    shapes=[TINY],
    tokens=(1, 8),
    modes=("eager",),
    eager_tokens=(1, 8),
    rounds=2,
    window_s=0.0005,
    eager_calls=4,
    ladder=False,
    backends=BackendOptions((TorchLoopConfig(chunk_rows=(0,)),)),
)


def right(layer: BoundLayer) -> Call:
    return lambda acts: compute(layer, acts).to(acts.hidden_states.dtype)


def half_written(layer: BoundLayer) -> Call:
    """Leaves its last row to whatever lies in memory; on a CPU nothing poisons that, so the fake does."""

    def call(acts: MoEActivationPack) -> torch.Tensor:
        out = right(layer)(acts)
        out[-1] = torch.nan
        return out

    return call


def doubled(layer: BoundLayer) -> Call:
    return lambda acts: 2 * right(layer)(acts)


def scribbling(layer: BoundLayer) -> Call:
    def call(acts: MoEActivationPack) -> torch.Tensor:
        out = right(layer)(acts)
        acts.hidden_states.add_(1.0)
        return out

    return call


def raising(layer: BoundLayer) -> Call:
    def call(acts: MoEActivationPack) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    return call


def flat(layer: BoundLayer) -> Call:
    return lambda acts: right(layer)(acts).flatten()


def unbindable(layer: BoundLayer) -> Call:
    raise TypeError("apply() got an unexpected keyword argument")


def peer(name: str, bind: Callable[[BoundLayer], Call] = right, least: int = 1) -> Peer:
    return Peer(name, "1.0", lambda problem, tokens: None if tokens >= least else "too few", bind)


def run(
    peers: list[Peer], plan: Plan = PLAN, rows: list[Any] | None = None, **more: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, tuning = rows if rows is not None else [], list[dict[str, Any]]()
    kernels.run_matrix(plan, peers, CPU, rows=rows, tuning=tuning, **more)
    return rows, tuning


def test_a_row_holds_both_times_both_errors_and_the_tuned_tactic() -> None:
    rows, tuning = run([peer("a")], tag={"kernel_sources": "ab"})
    assert [(row["tokens"], row["mode"], row["peer"]) for row in rows] == [(1, "eager", "a"), (8, "eager", "a")]
    assert tuning == []
    for row in rows:
        assert set(kernel_bars.EAGER_FIELDS) <= set(row)
        assert row["kernel_sources"] == "ab"
        assert row["tactic"].startswith("torch_loop(")
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"], rel=1e-3)
        assert row["same_bits"] is True
        assert set(row["ours_error"]) == set(row["peer_error"]) == set(kernel_inputs.ROUTINGS)
        # The peer is the truth rounded once; torch_loop rounds on the way too. Neither is exact, so the measure is not blind.
        assert all(0 < error < 0.02 for error in (*row["ours_error"].values(), *row["peer_error"].values()))


def test_the_whole_ladder_is_tuned_three_times_and_its_times_are_kept() -> None:
    rows, tuning = run([peer("a")], dataclasses.replace(PLAN, ladder=True, tokens=(8,)))
    assert len(rows) == 1
    (times,) = tuning
    assert set(kernel_bars.TUNING_FIELDS) <= set(times)
    assert (times["shape"], times["dtype"], times["buckets"], times["stored_hits"]) == ("tiny", "bf16", 4, 4)
    assert times["candidates"] >= 4
    assert len(times["warm_bucket_s"]) == 4


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        (half_written, "uniform: 1 of 8 rows hold NaN"),
        (doubled, r"uniform: its error is (1|0\.99\d|1\.00\d?) of the result, above 0\.2: it computes something else"),
        (scribbling, "uniform: it changed hidden_states"),
        (raising, "RuntimeError: no kernel image is available"),
        (flat, r"its output is \[256\] torch.bfloat16"),
        (unbindable, r"TypeError: apply\(\) got an unexpected keyword argument"),
    ],
)
def test_a_peer_that_is_wrong_or_raises_is_a_row_with_its_reason_and_spoils_no_other(
    bind: Callable[[BoundLayer], Call], reason: str
) -> None:
    rows, _ = run([peer("bad", bind), peer("good")], dataclasses.replace(PLAN, tokens=(8,)))
    bad, good = rows
    assert re.search(reason, bad["reason"]), bad["reason"]
    assert "peer_us" not in bad
    assert good["ratio"] > 0
    assert any("bad was not timed" in objection for objection in kernel_bars.objections(rows, [], PLAN, {}))


def test_ours_that_fails_is_a_row_for_each_peer_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels._ShapeBench._judge_ours

    def broken(self: Any, questions: Any, tactic: Any) -> Any:
        if len(questions[0].acts.hidden_states) == 1:
            raise RuntimeError("out of resources")
        return before(self, questions, tactic)

    monkeypatch.setattr(kernels._ShapeBench, "_judge_ours", broken)
    rows, _ = run([peer("a"), peer("b")])
    assert [row.get("reason") for row in rows[:2]] == ["ours: RuntimeError: out of resources"] * 2
    assert all("ratio" in row for row in rows[2:])


def test_what_is_there_is_kept_and_only_what_is_missing_is_timed() -> None:
    rows, _ = run([peer("a")])
    rows[0]["mark"] = "old"
    kept = [dict(row) for row in rows]
    again, _ = run([peer("a"), peer("b", least=8)], rows=rows)
    assert again[:2] == kept
    assert [(row["tokens"], row["peer"]) for row in again[2:]] == [(8, "b")]


def test_a_shorter_ladder_s_times_are_not_taken_for_the_whole_one_s() -> None:
    plan = dataclasses.replace(PLAN, ladder=True, tokens=(2,), eager_tokens=(2,))
    rows, tuning = run([peer("a")], plan)
    kernels.run_matrix(dataclasses.replace(plan, tokens=(2, 8)), [peer("a")], CPU, rows=rows, tuning=tuning)
    assert [times["buckets"] for times in tuning] == [2, 4]
    parts = [part(rows, tuning[:1]), part(rows, tuning[1:])]
    assert kernel_bars.merged(parts)["tuning"] == tuning


def test_it_stops_at_its_time_and_counts_what_is_left() -> None:
    rows: list[dict[str, Any]] = []
    left = kernels.run_matrix(PLAN, [peer("a")], CPU, rows=rows, tuning=[], stop_at=time.monotonic() - 1)
    assert (left, rows) == (2, [])


def test_every_cell_is_saved_as_it_comes() -> None:
    saved: list[int] = []
    rows: list[dict[str, Any]] = []
    kernels.run_matrix(PLAN, [peer("a")], CPU, rows=rows, tuning=[], save=lambda: saved.append(len(rows)))
    assert saved == [0, 1, 2]


# -- inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", kernel_inputs.ROUTINGS)
def test_inputs_are_fresh_ids_are_unique_in_a_row_and_weights_sum_to_one(routing: str) -> None:
    problem = Shape("s", 64, 8, 16, 16).problem("bf16", max_num_tokens=64)
    first, second = (kernel_inputs.draw_inputs(problem, 64, routing, seed, CPU) for seed in (0, 1))
    assert not torch.equal(first.hidden_states, second.hidden_states)
    ids = first.topk_ids
    assert ids is not None
    assert first.topk_weights is not None
    assert all(len(set(row)) == 8 for row in ids.tolist())
    torch.testing.assert_close(first.topk_weights.sum(1), torch.ones(64))
    counts = torch.bincount(ids.flatten().long(), minlength=64)
    if routing == "single":
        assert sorted(counts.tolist())[-8:] == [64] * 8
    else:  # 512 slots over 64 experts: 8 each if even; the most popular of a zipf gets nearly every token
        assert (int(counts.max()) > 40) == (routing == "skewed")


def test_calls_of_one_token_share_no_expert_until_all_were_read() -> None:
    problem = Shape("s", 64, 8, 16, 16).problem("bf16", max_num_tokens=1)
    inputs = [kernel_inputs.draw_inputs(problem, 1, "uniform", seed, CPU) for seed in range(kernel_inputs.copies_of(1))]
    kernel_inputs.spread_experts(inputs, 64)
    chosen = [set(acts.topk_ids.flatten().tolist()) for acts in inputs if acts.topk_ids is not None]
    assert all(len(one) == 8 for one in chosen)
    assert len(set().union(*chosen[:8])) == 64


def test_floor_counts_experts_hit_or_operations_whichever_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    shape = kernel_inputs.SHAPES[0]  # 128 experts of 3 x 2048 x 768
    problem, cuda = shape.problem("bf16", max_num_tokens=1), torch.device("cuda", 0)
    one = [kernel_inputs.draw_inputs(problem, 1, "uniform", 0, CPU)]
    assert kernel_inputs.floor_us(shape, "bf16", one, cuda) == pytest.approx((8 * 3 * 2048 * 768 * 2 + 2048 * 4) / 4.55e12 * 1e6, abs=1e-3)
    many = [MoEActivationPack(hidden_states=torch.empty(16384, 0), topk_ids=torch.arange(128)[None], topk_weights=torch.empty(0))]
    assert kernel_inputs.floor_us(shape, "bf16", many, cuda) == pytest.approx(2 * 16384 * 8 * 3 * 2048 * 768 / 679e12 * 1e6, abs=1e-2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H20")
    assert kernel_inputs.floor_us(shape, "bf16", one, cuda) is None


# -- the judge ------------------------------------------------------------------------------------------------------------

JUDGED = Plan(shapes=[Shape("s", 8, 2, 32, 16, ("bf16", "fp8"))], tokens=(1, 64), ladder=True)
ABLE = {"vllm_triton": ["bf16", "fp8"], "vllm_deepgemm": ["fp8"], "torch_grouped_mm": ["bf16"]}


def made_up(ratio: float = 1.5) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A table as it should be."""
    error = dict.fromkeys(kernel_inputs.ROUTINGS, 0.003)
    rows = []
    for dtype, peers in (("bf16", ("vllm_triton", "torch_grouped_mm")), ("fp8", ("vllm_triton", "vllm_deepgemm"))):
        for mode, tokens in (("cuda_graph", 1), ("cuda_graph", 64), ("eager", 1)):
            for name in peers:
                if name == "vllm_deepgemm" and tokens < 64:
                    continue
                row = {
                    "shape": "s", "dtype": dtype, "tokens": tokens, "mode": mode, "peer": name, "tactic": "triton(path=decode)", "peer_us": 10.0 * ratio,
                    "ours_us": 10.0, "floor_us": 9.0, "ratio": ratio, "peer_spread_us": 0.1, "ours_spread_us": 0.1, "ours_error": error,
                    "peer_error": error, "same_bits": True,
                }  # fmt: skip
                if mode == "eager":
                    row |= {"peer_host_us": 300.0, "ours_host_us": 20.0, "calls": 1000}
                rows.append(row)
    times = {"buckets": 7, "candidates": 90, "kernels": 60, "cold_s": 30.0, "warm_s": 4.0, "stored_s": 0.1}
    return rows, [{"shape": "s", "dtype": dtype, **times} for dtype in ("bf16", "fp8")]


def test_the_judge_accepts_what_is_whole_and_all_its_bars_hold() -> None:
    rows, tuning = made_up()
    assert kernel_bars.objections(rows, tuning, JUDGED, ABLE) == []
    assert {bar.holds for bar in kernel_bars.bars(rows, tuning) if "SonicMoE" not in bar.name} == {True}


@pytest.mark.parametrize("at", range(len(made_up()[0])))
def test_any_missing_or_doubled_row_is_refused(at: int) -> None:
    rows, tuning = made_up()
    row = rows[at]
    name = f"{row['shape']} {row['dtype']} {row['tokens']} {row['mode']} {row['peer']}"
    assert kernel_bars.objections(rows[:at] + rows[at + 1 :], tuning, JUDGED, ABLE) == [f"no row for {name}"]
    assert kernel_bars.objections([*rows, row], tuning, JUDGED, ABLE) == [f"two rows for {name}"]


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"reason": "RuntimeError: x"}, "s bf16 1 cuda_graph: vllm_triton was not timed: RuntimeError: x"),
        ({"fault": "uniform: it wrote behind"}, "s bf16 1 cuda_graph: uniform: it wrote behind"),
        ({"same_bits": False}, "s bf16 1 cuda_graph: triton(path=decode) gave other bits at its second run"),
        ({"ratio": 2.0}, "s bf16 1 cuda_graph: ratio 2.0 is not 15.0 over 10.0"),
    ],
)
def test_a_row_that_is_wrong_is_refused(change: dict[str, Any], objection: str) -> None:
    rows, tuning = made_up()
    rows[0] = rows[0] | change
    assert objection in kernel_bars.objections(rows, tuning, JUDGED, ABLE)


@pytest.mark.parametrize("name", kernel_bars.GRAPH_FIELDS)
def test_a_row_without_a_field_is_refused(name: str) -> None:
    rows, tuning = made_up()
    del rows[0][name]
    assert f"s bf16 1 cuda_graph: vllm_triton: no field {name}" in kernel_bars.objections(rows, tuning, JUDGED, ABLE)


def test_a_ladder_without_its_times_is_refused() -> None:
    rows, tuning = made_up()
    refused = ["0 rows of tuning times for s bf16 over its ladder of 7 buckets"]
    assert kernel_bars.objections(rows, tuning[1:], JUDGED, ABLE) == refused
    tuning[0]["buckets"] = 3  # of a run with fewer tokens
    assert kernel_bars.objections(rows, tuning, JUDGED, ABLE) == refused


def test_a_shorter_ladder_s_times_judge_no_bar() -> None:
    rows, tuning = made_up()
    tuning[0] |= {"buckets": 3, "cold_s": 91.0}
    held = {bar.name: bar.holds for bar in kernel_bars.bars(rows, tuning) if "ladder" in bar.name}
    assert held == {
        f"{dtype}: tuning a whole ladder, kernels {how}": dtype == "fp8" or None for dtype in ("bf16", "fp8") for how in ("cold", "warm")
    }


@pytest.mark.parametrize(
    ("where", "change", "bar"),
    [
        ((0, "bf16"), {"ratio": 0.97, "peer_us": 9.7}, "bf16: every graph cell against vLLM's best"),
        ((0, "bf16"), {"ratio": 1.29, "peer_us": 12.9}, "bf16: geometric mean at one token"),
        ((64, "fp8"), {"floor_us": 7.9}, "fp8: over the floor, 4 to 256 tokens, geometric mean"),
        ((0, "bf16"), {"ours_error": dict.fromkeys(kernel_inputs.ROUTINGS, 0.0031)}, "bf16: errors no larger than the peers'"),
    ],
)
def test_one_cell_that_misses_its_bar_is_told(where: tuple[int, str], change: dict[str, Any], bar: str) -> None:
    rows, tuning = made_up()
    for row in rows:
        if row["mode"] == "cuda_graph" and row["dtype"] == where[1] and row["tokens"] == (where[0] or 1):
            row |= change
    held = {found.name: found.holds for found in kernel_bars.bars(rows, tuning)}
    assert held[bar] is False
    others = {name for name, holds in held.items() if holds is False} - {bar}
    assert others <= {"bf16: geometric mean at one token"}, "a slow cell may pull its own mean down too"


def test_a_mean_below_its_bar_is_told_though_no_cell_loses() -> None:
    rows, tuning = made_up(ratio=1.19)
    held = {found.name: found.holds for found in kernel_bars.bars(rows, tuning)}
    assert held["bf16: every graph cell against vLLM's best"] is True
    assert held["bf16: geometric mean over the graph cells"] is False
    assert held["fp8: geometric mean over the graph cells"] is False


def test_sglang_is_judged_where_it_was_a_peer_and_by_its_own_cells_alone() -> None:
    rows, tuning = made_up()
    assert [bar.name for bar in kernel_bars.bars(rows, tuning) if "SGLang" in bar.name] == []
    rows = [row | {"peer": "sglang_triton"} for row in rows if row["peer"] == "vllm_triton"]
    assert kernel_bars.objections(rows, tuning, JUDGED, {"sglang_triton": ["bf16", "fp8"]}) == []
    slow = next(row for row in rows if (row["dtype"], row["mode"], row["tokens"]) == ("fp8", "cuda_graph", 64))
    slow |= {"peer_us": 9.7, "ratio": 0.97}
    assert {bar.name: (bar.holds, bar.value) for bar in kernel_bars.bars(rows, tuning) if "against" in bar.name and bar.value} == {
        "bf16: every graph cell against SGLang": (True, 1.5),
        "bf16: geometric mean against SGLang": (True, pytest.approx(1.5)),
        "fp8: every graph cell against SGLang": (False, 0.97),
        "fp8: geometric mean against SGLang": (False, pytest.approx((1.5 * 0.97) ** 0.5)),
    }


def test_host_and_tuning_times_are_judged_by_the_worst_shape() -> None:
    rows, tuning = made_up()
    rows[-1]["ours_host_us"] = 61.0
    tuning[0]["cold_s"] = 91.0
    missed = [(bar.name, bar.where) for bar in kernel_bars.bars(rows, tuning) if bar.holds is False]
    assert sorted(missed) == [("bf16: tuning a whole ladder, kernels cold", "s"), ("fp8: host time of an eager call at one token", "s")]


def test_the_best_peer_is_the_faster_of_vllms_two() -> None:
    rows, tuning = made_up()
    slow = next(row for row in rows if row["peer"] == "vllm_deepgemm")
    slow |= {"peer_us": 12.0, "ratio": 1.2}
    assert kernel_bars.best_peers(rows, "fp8", "cuda_graph", kernel_bars.VLLM)["s", 64] is slow
    text = kernel_bars.tables(rows, tuning)
    assert "| s | 10.0 (1.50) | 10.0 (1.20) |" in text
    assert "| geometric mean of the ratios, 1.34 in all | 1.50 | 1.20 |" in text
    assert "| ours over the floor, 1.11 in all | 1.11 | 1.11 |" in text
    assert "torch_grouped_mm over ours" in text


# -- parts and the command ------------------------------------------------------------------------------------------------


def part(rows: list[dict[str, Any]], tuning: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "command": "c", "time": "2026-11-30T01:00:00Z", "machine": {"gpu": "NVIDIA H200", "driver": "580"}, "versions": {"torch": "2.11", "triton": "3.6"},
        "peers": {"vllm_triton": "0.33.0"}, "kernels": rows, "tuning": tuning, **changes,
    }  # fmt: skip


def test_parts_are_merged_and_what_one_peer_lacked_in_one_part_is_no_loss() -> None:
    rows, tuning = made_up()
    parts = [
        part(rows[:3], tuning[:1], peers={"vllm": "missing: no module"}, command="first"),
        part(rows[2:], tuning[1:], time="2026-11-30T02:00:00Z", peers={"vllm": "0.33.0"}, command="second"),
    ]
    whole = kernel_bars.merged(parts)
    assert whole["kernels"] == rows
    assert whole["tuning"] == tuning
    assert (whole["command"], whole["time"], whole["peers"]) == ("first && second", "2026-11-30T02:00:00Z", {"vllm": "0.33.0"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": {"gpu": "NVIDIA H100", "driver": "580"}}, "rows come from gpu 'NVIDIA H100' and from 'NVIDIA H200'"),
        ({"versions": {"torch": "2.11", "triton": "3.7"}}, "rows come from triton 3.7 and from 3.6"),
    ],
)
def test_parts_of_other_cards_or_versions_are_refused(changes: dict[str, Any], message: str) -> None:
    rows, tuning = made_up()
    with pytest.raises(ConfigError, match=message):
        kernel_bars.merged([part(rows[:1], []), part(rows[1:], tuning, **changes)])


def test_two_results_of_one_cell_are_refused() -> None:
    rows, tuning = made_up()
    with pytest.raises(ConfigError, match="two parts have different rows for s bf16 1 cuda_graph vllm_triton; leave one of them out"):
        kernel_bars.merged([part(rows, tuning), part([rows[0] | {"ours_us": 9.0}], [])])


def test_a_family_that_cannot_be_had_is_named_with_its_reason() -> None:
    with open_peers(["torch", "vllm", "sglang", "sonicmoe"], CPU, 8) as found:
        assert [one.name for one in found.peers] == ["torch_grouped_mm"]
        assert found.missing == {
            name: f"ModuleNotFoundError: {name} is not installed here"  # said first, of a package and a GPU that are lacking
            for name in ("vllm", "sglang", "sonicmoe")
        }
    with (
        pytest.raises(ConfigError, match="peer 'trt' is not known; choose some of vllm, sglang, sonicmoe, torch"),
        open_peers(["trt"], CPU, 8),
    ):
        pass


def test_torchs_own_products_are_a_right_peer() -> None:
    with open_peers(["torch"], CPU, 8) as found:
        rows, _ = run(list(found.peers), dataclasses.replace(PLAN, tokens=(8,)))
    assert "reason" not in rows[0]
    with open_peers(["torch"], CPU, 8) as found:
        problem = Shape("s", 8, 2, 128, 128, ("fp8",)).problem("fp8", max_num_tokens=8)
        assert found.peers[0].why_not(problem, 8) == "grouped_mm has no product for fp8 weights"


def test_the_command_resumes_merges_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """`--device cpu` times eager calls of one token alone; the shapes are replaced by one that a CPU can do."""
    monkeypatch.setattr(kernel_inputs, "SHAPES", (TINY,))
    monkeypatch.setattr(kernel_inputs, "EAGER_TOKENS", (1,))
    file = tmp_path / "rows.json"
    arguments = ["bench", "kernels", "--device", "cpu", "--peers", "vllm,torch", "--dtypes", "bf16", "--tokens", "1", "--tune", "cells"]
    assert main([*arguments, "--json", str(file)]) == 0
    first = json.loads(file.read_text())
    shown, said = capfd.readouterr()
    assert "peer vllm can't be had: ModuleNotFoundError: vllm is not installed here" in said
    assert first["peers"]["vllm"].startswith("missing: ")
    assert "| tiny | 1 | torch_grouped_mm |" in shown
    assert [row["peer"] for row in first["kernels"]] == ["torch_grouped_mm"]
    assert main([*arguments, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["kernels"] == first["kernels"], "what is there is kept"
    assert main([*arguments, "--json", str(file), "--again"]) == 0
    assert json.loads(file.read_text())["kernels"] != first["kernels"]
    capfd.readouterr()
    whole = tmp_path / "whole.json"
    assert main([*arguments, "--merge", str(file), "--json", str(whole)]) == 0
    assert json.loads(whole.read_text())["kernels"] == json.loads(file.read_text())["kernels"]
    file.write_text(json.dumps(first | {"machine": first["machine"] | {"gpu": "another"}}))
    assert main([*arguments, "--json", str(file)]) == 2
    assert "use another --json FILE, or --again" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_cpu_must_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--json", str(tmp_path / "rows.json")]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "moe-dist: --device cuda: torch sees no CUDA device in this process; use --device cpu, which compares torch's own paths\n"
    )
    assert not list(tmp_path.iterdir())


def test_help_says_what_is_taken_by_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--help"])
    said = {part.split()[0]: part for part in capsys.readouterr().out.split("\n  --")[1:]}
    for option in ("peers", "shapes", "dtypes", "tokens", "modes", "tune", "minutes", "device"):
        assert "default" in said[option], option
