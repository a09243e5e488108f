"""The driver of served speed, over engines that are small scripts: order of questions, rows, resumption, failures, intervals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench.engines import Ledger, Plan, engine_objections, interval, measure, write_model
from moe_dist.cli.main import main
from moe_dist.process import started_s

# Answers as an engine would: moe_dist is a fifth faster, and each pair is noisy in the same way. FAIL names a backend that fails at start.
FAKE = """
import json, os, sys
spec = json.loads(sys.argv[1])
ours = spec["backend"] == "moe_dist"
said = open(LOG, "a")
tick = 0
print(json.dumps({"loaded": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    what = asked["do"]
    print(spec["backend"], what, asked.get("batch", ""), file=said, flush=True)
    if what == "start":
        print(spec["environment"]["CUDA_VISIBLE_DEVICES"], *sorted(os.sched_getaffinity(0)), file=open(LOG + "-cores", "a"), flush=True)
    if what == "end":
        break
    if what == "start" and spec["backend"] == FAIL:
        print("the reason lies here", file=sys.stderr, flush=True)
        print(json.dumps({"error": "RuntimeError: no card"}), flush=True)
        continue
    worker = {"rank": 0, "experts": ["X"], "layers": 2, "kv_tokens": 990 if ours else 1000, "executed": {"eager": 3}}
    if ours:
        worker |= {"epoch": "e", "measured": 7, "tuning_seconds": 1.5, "lines": ["a line"],
                   "buckets": [{"own": True}, {"own": True}, {"own": True}, {"own": False}]}
    tick += 1
    speed = (1.2 if ours else 1.0) * (1 + 0.001 * (tick % 3))
    answer = {
        "start": {"seconds": 2.0, "workers": [worker, worker]},
        "report": [worker],
        "generate": {"seconds": 1.0, "tokens_per_s": 100 * speed, "itl_us": 1000 / speed, "tokens": [[1, 2, 3 if ours else 4]] * 8},
        "host": {"step_us": 1000.0, "replay_us": 20.0 if ours else 10.0},
        "moe_us": [{"tokens": count, "us": 500.0 * count, "own": count < 100 if ours else None} for count in asked.get("counts", [])],
        "moe_error": [{"tokens": count, "error": 0.01 if ours else 0.02} for count in asked.get("counts", [])],
        "logits": [[0.0, 2.0, 4.0, 6.0 + (spec["draw"] != "dequantised") * (1 if ours else 2)]] * 8,
        "profile": {"moe_share": 0.5, "busy": 0.9, "top": []},
    }[what]
    print(json.dumps({"answer": answer}), flush=True)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    def made(fail: str = "", **fields: Any) -> Plan:
        script = tmp_path / "fake.py"
        script.write_text(f"LOG, FAIL = {str(tmp_path / 'said')!r}, {fail!r}\n{FAKE}")
        fields = {"dtypes": ["bf16"], "modes": ["eager"], "batches": [1], "pairs": 5, "layers": 2, **fields}
        return Plan(process=[sys.executable, str(script)], store=tmp_path / "store", logs=tmp_path / "logs", **fields)

    return made


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


def test_a_cell_has_its_ratio_its_shares_and_what_its_engines_are(plan: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    ledger = Ledger(tmp_path / "rows.json")
    assert measure(plan(), ledger, notes.append) == []
    (cell,) = ledger.tables["cells"]
    assert (cell["dtype"], cell["mode"], cell["tp"], cell["ep"], cell["batch"], cell["pairs"]) == ("bf16", "eager", 1, 1, 1, 5)
    assert cell["throughput_ratio"] == cell["latency_ratio"] == pytest.approx(1.2, abs=0.01)  # above 1 is better, in both
    assert cell["throughput_interval"][0] < 1.2 < cell["throughput_interval"][1]
    # A batch of 1: one prefill of 128 tokens, not ours, and 7 steps of one token, ours.
    assert cell["own_time_share"] == pytest.approx(7 / (7 + 128), abs=1e-4)
    assert cell["moe_time_share"] == pytest.approx(0.5, abs=0.01)
    assert (cell["host_moe_dist"]["replay_us"], cell["host_auto"]["replay_us"]) == (20.0, 10.0)
    assert (cell["own_bucket_share"], cell["tuning_seconds"], cell["kv_tokens"], cell["kv_tokens_auto"]) == (0.75, 1.5, 990, 1000)
    (tokens,) = ledger.tables["tokens"]
    assert (tokens["first_equal"], tokens["of"], tokens["mean_prefix"]) == (8, 8, 2.0)
    (errors,) = ledger.tables["errors"]
    assert (errors["layer_moe_dist"], errors["layer_auto"]) == ([0.01] * 4, [0.02] * 4)
    assert "logits_auto" not in errors
    assert any("a line" in note for note in notes)


def test_pairs_alternate_and_profiles_come_last(plan: Any, tmp_path: Path) -> None:
    measure(plan(batches=[1, 4]), Ledger(tmp_path / "rows.json"), lambda line: None)
    asked = [line.split()[0] for line in said(tmp_path) if line.endswith("generate 1")]
    assert asked == ["auto", "moe_dist"] * 2 + ["auto", "moe_dist", "moe_dist", "auto"] * 2 + ["auto", "moe_dist"]  # twice to warm up
    first = said(tmp_path).index("auto profile 1")
    assert not any("generate" in line for line in said(tmp_path)[first:])
    assert said(tmp_path)[first + 1] == "moe_dist profile 1"


def test_pairs_are_counted_by_mode_where_nothing_is_said(plan: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json")
    measure(plan(pairs=None, modes=["cuda_graph", "eager"]), ledger, lambda line: None)
    assert {row["mode"]: row["pairs"] for row in ledger.tables["cells"]} == {"cuda_graph": 20, "eager": 100}


def test_a_run_that_was_cut_measures_what_is_missing(plan: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    measure(plan(), Ledger(rows), lambda line: None)
    (tmp_path / "said").unlink()
    measure(plan(batches=[1, 4]), Ledger(rows), lambda line: None)
    assert [cell["batch"] for cell in json.loads(rows.read_text())["cells"]] == [1, 4]
    assert not any("generate 1" in line or "profile 1" in line for line in said(tmp_path))
    (tmp_path / "said").unlink()
    assert measure(plan(batches=[1, 4]), Ledger(rows), lambda line: None) == []
    assert not (tmp_path / "said").exists()  # nothing is missing, so no engine is started


def test_an_engine_that_fails_is_a_line_with_its_log_and_the_others_are_measured(plan: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json")
    (failure,) = measure(plan(fail="auto"), ledger, lambda line: None)
    assert "RuntimeError: no card" in failure
    assert "the reason lies here" in failure
    assert "cells" not in ledger.tables
    assert "starts" not in ledger.tables  # the stock engine starts first


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process outlives who started it")
def test_an_engine_dies_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    """It may be at work then, and hear of no end of its input."""
    script = f"""
import os, signal, sys, time
from pathlib import Path
from moe_dist.bench.engines import Engine
busy = "import os, sys, time; open(sys.argv[2], 'w').write(str(os.getpid())); os.rename(sys.argv[2], sys.argv[1]); time.sleep(600)"
pid = Path({str(tmp_path / "pid")!r})
Engine([sys.executable, "-c", busy, str(pid), str(pid) + ".part"], {{}}, Path({str(tmp_path / "log")!r}), sorted(os.sched_getaffinity(0)))
while not pid.exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    try:
        until = time.monotonic() + 60
        while started_s(pid) is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert started_s(pid) is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_dtypes_are_shared_out_over_cards(plan: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json")
    measure(plan(dtypes=["bf16", "fp8"], cards=[0, 1]), ledger, lambda line: None)
    assert {cell["dtype"] for cell in ledger.tables["cells"]} == {"bf16", "fp8"}
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2  # 0: one core serves all
    ran = {tuple(map(int, line.split())) for line in (tmp_path / "said-cores").read_text().splitlines()}
    assert ran == {(card, *(cores[card * half : (card + 1) * half] or cores)) for card in range(2)}  # those of all engines of a card


def test_fp8_logits_are_compared_with_a_third_engine_s_in_bf16(plan: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json")
    assert measure(plan(dtypes=["fp8"]), ledger, lambda line: None) == []
    (errors,) = ledger.tables["errors"]
    # One of four logits is off by 1 and by 2; the truth is 0, 2, 4, 6, of deviation sqrt(5).
    assert errors["logits_moe_dist"] == pytest.approx(math.sqrt(1 / 4) / math.sqrt(5), abs=1e-4)
    assert errors["logits_auto"] == pytest.approx(math.sqrt(4 / 4) / math.sqrt(5), abs=1e-4)
    assert (errors["first_moe_dist"], errors["first_auto"]) == (1.0, 1.0)
    # In bf16 it needs the memory of both: it starts when they have ended.
    lines = said(tmp_path)
    assert lines[-3:] == ["auto start ", "auto logits 8", "auto end "]
    assert {"auto end ", "moe_dist end "} <= set(lines[:-3])


def test_engines_that_do_not_fit_a_card_together_are_refused_before_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["bench", "vllm", "--control", "--memory", "0.4", "--json", str(rows)]))
    assert ended.value.code == 2
    assert "--memory 0.4: three engines live on a card at once, so each may take 0.33 of it at most" in capsys.readouterr().err
    assert not rows.exists()


def test_without_vllm_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "vllm", "--json", str(tmp_path / "rows.json"), "--logs", str(tmp_path / "logs")]) == 2
    assert capsys.readouterr().err == (
        f"moe-dist: vLLM is not installed for {sys.executable}, which would start the engines; run this by the Python of one that has it\n"
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "vllm"]) == 2
    assert list(tmp_path.iterdir()) == [], "nor where what has no name lies"


@pytest.mark.parametrize(
    ("seen", "cards", "message"),
    [
        (0, ["0"], "--cards 0: torch sees 0 GPUs here, and the engines need one\n"),
        (1, ["0", "1"], "--cards 0 1: torch sees 1 GPU here, counted from 0\n"),
    ],
)
def test_cards_that_are_not_there_are_refused_before_anything_is_made(
    seen: int, cards: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "vllm", "--cards", *cards]) == 2
    assert capsys.readouterr().err == f"moe-dist: {message}"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_t_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tuned").touch()
    assert main(["bench", "vllm"]) == 2
    assert capsys.readouterr().err == (
        f"moe-dist: --json '.tuned/vllm.json': the folder '{tmp_path}/.tuned' is no folder; make it, or name another place\n"
    )


@pytest.mark.parametrize(
    ("count", "cut"),
    # Of 5 and 8 pairs the whole range: leaving one out at each end would be 62% and 93%. Of 9 one, 96%; of 12 two; of 15 three.
    [(5, 0), (8, 0), (9, 1), (12, 2), (15, 3)],
)
def test_interval_of_the_median_leaves_out_what_95_percent_allow(count: int, cut: int) -> None:
    ratios = [1.0 + step / 100 for step in range(count)]
    middle, low, high = interval(ratios[::-1])
    assert middle == pytest.approx(1.0 + (count - 1) / 200)
    assert (low, high) == (ratios[cut], ratios[-1 - cut])


def test_one_spoiled_pair_spoils_no_interval_of_nine() -> None:
    assert interval([1.0] * 8 + [0.1]) == (1.0, 1.0, 1.0)


def test_a_control_says_what_two_equal_engines_differ_by(plan: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json")
    assert measure(plan(control=True), ledger, lambda line: None) == []
    (cell,) = ledger.tables["cells"]
    assert cell["throughput_control"] == pytest.approx([1.0, 1.0, 1.0], abs=0.01)
    assert [row["backend"] for row in ledger.tables["starts"]] == ["auto", "moe_dist", "control"]


def test_the_model_keeps_the_share_of_its_layers(tmp_path: Path) -> None:
    """16 of 48 layers get a third of the words; fp8 leaves all but the experts alone."""
    config = json.loads((write_model(tmp_path, "fp8", 16) / "config.json").read_text())
    assert config["vocab_size"] == 151936 * 16 // 48 // 64 * 64
    assert config["num_hidden_layers"] == 16
    skipped = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.15.self_attn.q_proj" in skipped
    assert "model.layers.15.mlp.gate" in skipped
    assert not any("experts" in name for name in skipped)
    assert "quantization_config" not in json.loads((write_model(tmp_path, "bf16", 16) / "config.json").read_text())


def tables(
    cell: dict[str, Any] | None = None, profile: dict[str, Any] | None = None, start: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One cell that holds every bar, with changes."""
    place = {"dtype": "bf16", "mode": "eager", "tp": 1, "ep": 1}
    good = {
        **place, "batch": 1, "pairs": 5, "throughput_ratio": 1.1, "throughput_interval": [1.0, 1.2], "latency_ratio": 1.1,
        "latency_interval": [1.0, 1.2], "kv_tokens": 990, "kv_tokens_auto": 1000, "tuning_seconds": 60.0, "tuned": 100, "moe_us": 10.0,
        "own_time_share": 0.6, "moe_time_share": 0.7,
    }  # fmt: skip
    return {
        "cells": [good | (cell or {})],
        "profiles": [{**place, "batch": 1, "backend": "auto", **({"moe_share": 0.6} if profile is None else profile)}],
        "starts": [{**place, "alike": True, "epochs": ["a"], **(start or {})}],
    }


def test_a_cell_that_holds_every_bar_has_no_objection() -> None:
    assert engine_objections(tables(), ["bf16"], ["eager"], [1]) == []
    # Where the MoE layers are less than half of the device's time, equal is enough.
    equal = {"throughput_ratio": 1.0, "throughput_interval": [0.98, 1.02], "latency_ratio": 1.0, "latency_interval": [0.98, 1.02]}
    assert engine_objections(tables(equal, {"moe_share": 0.49}), ["bf16"], ["eager"], [1]) == []


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"cell": {"batch": 2}}, "no row for bf16 eager batch 1 tp 1 ep 1"),
        ({"cell": {"pairs": 4}}, "4 pairs, fewer than 5"),
        ({"cell": {"throughput_interval": [0.979, 1.2]}}, "throughput 1.1 with an interval from 0.979 to 1.2, below 0.98"),
        ({"cell": {"latency_ratio": 1.05}}, "latency 1.05, not above 1.05 though the MoE layers are 0.6 of the time"),
        ({"cell": {"throughput_ratio": 1.05, "moe_time_share": 0.3}}, "throughput 1.05, not above 1.05 though the MoE layers are 0.6 of"),
        ({"cell": {"kv_tokens": 989}}, "989 KV tokens beside 1000, below 0.99 of them"),
        ({"cell": {"tuning_seconds": 121.0}}, "tuning took 121.0 s for 100 candidates; the bar is 120 s, cold"),
        ({"cell": {"tuned": 0}}, "tuning took 60.0 s for 0 candidates"),  # a warm start is no figure of a cold one
        ({"cell": {"own_time_share": 0.5}}, "our own tactics serve 0.50 of the MoE time, not over 0.5"),
        ({"profile": {"error": "no CUPTI"}}, "no profile: no CUPTI"),
        ({"start": {"alike": False, "epochs": ["a", "b"]}}, "ranks serve different epochs: a, b"),
    ],
)
def test_what_is_missing_or_below_its_bar_is_named(changes: dict[str, Any], objection: str) -> None:
    (found,) = engine_objections(tables(**changes), ["bf16"], ["eager"], [1])
    assert objection in found


def test_a_cell_without_latency_is_incomplete() -> None:
    changed = tables()
    del changed["cells"][0]["latency_ratio"]
    assert engine_objections(changed, ["bf16"], ["eager"], [1]) == ["bf16 eager batch 1 tp 1 ep 1: no latency"]
