"""What a user types, with --moe-backend=moe_dist on one CPU: the doctor's command that tunes ahead, then serve, run-batch and bench on its store."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import vllm_tiny
from vllm_drive import NEW_TOKENS, PROMPTS
from vllm_engines import LEAST_CALLS, driver, end_session, environment, free_port, passed, summaries, vllm_command

from moe_dist.bench.engines import Ledger, Plan, measure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]  # of a machine where ten others work too; see the durations for a free one


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ahead")


@pytest.fixture(scope="module")
def tuned_ahead(model: Path, store: Path) -> str:
    """What the doctor said of `store` before; its command for tuning was run, as it is printed."""
    said = doctor(model, store)
    (command,) = re.findall(r"torchrun --nproc-per-node=1 -m moe_dist\.tune .*", said)
    subprocess.run(command.split(), check=True, timeout=600, env=on_path())
    return said


@pytest.fixture(scope="module")
def engines(model: Path, store: Path, tuned_ahead: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """vLLM's own experts, and ours on the store that was tuned ahead."""
    drive = driver(lambda: tmp_path_factory.mktemp("engine"))
    return passed(drive(*({"model": model, "backend": backend} for backend in ("auto", "moe_dist")), MOE_DIST_STORE=str(store))).engines


def on_path() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def doctor(model: Path, store: Path) -> str:
    command = ["moe-dist", "doctor", "vllm", "--model", model, "--max-tokens", "64", "--store", store]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=on_path()).stdout


def test_the_doctor_s_command_tunes_ahead_for_the_engine(model: Path, store: Path, tuned_ahead: str, engines: list[dict[str, Any]]) -> None:
    """The engine's keys are the launcher's, so its first start finds all of its cells."""
    assert "plugin: vLLM loads it in every process" in tuned_ahead
    assert f"tuned: {store} holds no epoch of any vLLM deployment" in tuned_ahead
    stock, ours = engines
    ((epoch, timed),) = summaries(ours["log"])
    assert timed == 0
    assert ours["tokens"] == stock["tokens"]
    assert re.search(rf"tuned: vllm:.*:tp1-pp1-dp1:stage0: epoch \d+ \({epoch}\) with 7 eager cells", doctor(model, store))


def test_server_answers_completions(model: Path, store: Path, engines: list[dict[str, Any]], tmp_path: Path) -> None:
    port = free_port()
    log, witness = tmp_path / "log.txt", tmp_path / "witness"
    command = [
        Path(sys.executable).parent / "vllm", "serve", model, "--moe-backend=moe_dist", "--served-model-name=tiny", "--dtype=float32",
        "--enforce-eager", "--max-model-len=128", "--max-num-batched-tokens=64", "--max-num-seqs=8", f"--port={port}", "--host=127.0.0.1",
    ]  # fmt: skip
    with log.open("w") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment(witness, MOE_DIST_STORE=str(store), VLLM_ENABLE_V1_MULTIPROCESSING="1"),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 600
            while not _get(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < deadline, log.read_text()[-6000:]
                time.sleep(0.5)
            before = sum(len(path.read_text().split()) for path in witness.iterdir())
            asked = {
                "model": "tiny",
                "prompt": PROMPTS[0],
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = json.load(answer)
            after = sum(len(path.read_text().split()) for path in witness.iterdir())
        finally:
            end_session(server)
    assert said["choices"][0]["token_ids"] == engines[0]["tokens"][0]
    assert after - before >= LEAST_CALLS


def test_run_batch_and_bench_run_our_experts(model: Path, store: Path, engines: list[dict[str, Any]], tmp_path: Path) -> None:
    engine = ["--model", model, "--moe-backend=moe_dist", "--dtype=float32", "--enforce-eager", "--max-model-len=128",
              "--max-num-batched-tokens=64", "--max-num-seqs=8"]  # fmt: skip
    witness, asked, answered = tmp_path / "witness", tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    words = " ".join(f"t{token}" for token in PROMPTS[0])
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    asked.write_text(json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    files = ["-i", asked, "-o", answered, "--served-model-name=tiny", "--chat-template", template]
    passed(vllm_command(["run-batch", *files, *engine], tmp_path / "batch.txt", witness, MOE_DIST_STORE=str(store)))
    said = json.loads(answered.read_text())["response"]["body"]["choices"][0]["message"]["content"]
    assert said.split() == [f"t{token}" for token in engines[0]["tokens"][0]]
    assert sum(len(path.read_text().split()) for path in witness.iterdir()) >= LEAST_CALLS
    traffic = ["--random-input-len=8", "--random-output-len=4", "--num-prompts=2"]
    witness = tmp_path / "bench-witness"
    passed(vllm_command(["bench", "throughput", *traffic, *engine], tmp_path / "bench.txt", witness, MOE_DIST_STORE=str(store)))
    assert sum(len(path.read_text().split()) for path in witness.iterdir()) >= vllm_tiny.LAYERS * 4


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_served_speed_is_measured_beside_stock(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`moe-dist bench vllm` over two real engines, asked in turns: what it measures on a GPU, all but drawn weights and the truth's engine."""
    for name, value in environment(tmp_path / "witness").items():
        monkeypatch.setenv(name, value)
    plan = Plan(
        process=[sys.executable, "-m", "moe_dist_vllm.bench"], model=model, dtypes=["bf16"], modes=["eager"], batches=[2], pairs=2, memory=0.2,
        store=tmp_path / "store", logs=tmp_path / "logs",
        keywords={"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 128, "max_num_seqs": 4},
    )  # fmt: skip
    ledger = Ledger(tmp_path / "rows.json")
    assert measure(plan, ledger, print) == []
    (cell,) = ledger.tables["cells"]
    assert cell["throughput_ratio"] > 0
    assert cell["latency_ratio"] > 0
    assert (cell["own_time_share"], cell["own_bucket_share"]) == (1.0, 1.0)  # a CPU has no experts of vLLM's own beside ours
    assert cell["tuned"] > 0
    (said,) = ledger.tables["tokens"]
    assert (said["first_equal"], said["mean_prefix"]) == (8, 16.0)  # float32: all 16 tokens of all 8 prompts
    assert said["executed"]["eager"] >= vllm_tiny.LAYERS * 16
    assert all(0 < row["moe_share"] < 1 for row in ledger.tables["profiles"])
    assert [row["experts"] for row in ledger.tables["starts"]] == [["CPUUnquantizedExperts"], ["MoEDistExperts"]]
    found = importlib.util.find_spec("vllm")  # a tree of another release may lie before the installed one
    assert found is not None
    assert found.origin is not None
    installed = runpy.run_path(str(Path(found.origin).with_name("_version.py")))["__version__"].split("+")[0]
    assert [(row["device"], row["versions"]["vllm"].split("+")[0]) for row in ledger.tables["starts"]] == [("cpu", installed)] * 2


def test_flag_is_in_the_help_of_every_command(tmp_path: Path) -> None:
    commands = [["serve"], ["bench", "throughput"], ["run-batch"]]
    vllm, env = Path(sys.executable).parent / "vllm", environment(tmp_path / "witness")
    started = [subprocess.Popen([vllm, *command, "--help=moe-backend"], stdout=subprocess.PIPE, text=True, env=env) for command in commands]
    for command, process in zip(commands, started, strict=True):
        said, _ = process.communicate(timeout=600)
        assert re.search(r"--moe-backend.*\{.*moe_dist.*\}", said, re.DOTALL), (command, said[-2000:])
        assert "Use the fastest kernel for each batch size" in " ".join(said.split()), (command, said[-2000:])  # however it is wrapped
