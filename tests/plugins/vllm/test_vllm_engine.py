"""The real vLLM on CPU with --moe-backend=moe_dist: the stock backend's tokens, our experts executed, tuned once and together.

In float32, where greedy tokens of all layouts agree; fp8 beside float16. An engine costs 10 to 60 s, so each is started once and asked many things.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import vllm_tiny
from vllm_drive import NEW_TOKENS, PROMPTS
from vllm_engines import Drive, Run, driver, end_session, environment, free_port, vllm_command

from moe_dist.bench.engines import Ledger, Plan, measure
from moe_dist.serving import stored_epochs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]  # of a machine where ten others work too; see the durations for a free one


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return driver(lambda: tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    quantised, dequantised = vllm_tiny.save_block_fp8(folder / "fp8", folder / "dequantised")
    return {"plain": vllm_tiny.save_plain(folder / "plain"), "fp8": quantised, "dequantised": dequantised}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def one_rank(drive: Drive, models: dict[str, Path], store: Path) -> Run:
    """Stock and ours on one rank: the oracles, a cold start, a warm one, and block-fp8."""
    return passed(
        drive(
            {"model": models["plain"], "backend": "auto"},
            {"model": models["dequantised"], "backend": "auto", "dtype": "float16"},  # vLLM's fp8 knows no float32
            {"model": models["plain"], "backend": "moe_dist"},
            {"model": models["plain"], "backend": "moe_dist"},
            {"model": models["fp8"], "backend": "moe_dist", "dtype": "float16"},
            MOE_DIST_STORE=str(store),
        )
    )


def passed(run: Run) -> Run:
    assert run.code == 0, run.log[-6000:]
    return run


def tokens(run: Run, index: int = 0) -> Any:
    return run.engines[index]["tokens"]


def executed(engine: dict[str, Any]) -> list[int]:
    """Calls of our experts while it generated, one number a process that made any."""
    return [calls - engine["before"].get(pid, 0) for pid, calls in engine["after"].items() if calls > engine["before"].get(pid, 0)]


def summaries(log: str) -> list[tuple[str, int]]:
    """(epoch digest, candidates timed) of each rank and start, in order."""
    return [(digest, int(timed)) for digest, timed in re.findall(r"serve epoch \d+ \((\w+)\) of .*; (\d+) candidates timed", log)]


# 4 prompts and a longer one: prefill, then every decode step, in each of the layers. Chunked prefill may add a step.
LEAST_CALLS = vllm_tiny.LAYERS * NEW_TOKENS


def test_one_rank_gives_the_stock_tokens_with_our_experts(one_rank: Run) -> None:
    assert tokens(one_rank, 2) == tokens(one_rank, 0)
    assert tokens(one_rank, 3) == tokens(one_rank, 0)
    assert not executed(one_rank.engines[0])  # the stock engine runs none of ours: the count can be 0
    assert [calls >= LEAST_CALLS for calls in executed(one_rank.engines[2])] == [True]
    assert len({str(row) for row in tokens(one_rank, 0)}) > 1  # a model whose tokens are all alike would prove nothing


def test_block_fp8_gives_the_tokens_of_its_dequantised_copy(one_rank: Run) -> None:
    assert tokens(one_rank, 4) == tokens(one_rank, 1)
    assert tokens(one_rank, 1) != tokens(one_rank, 0)  # quantising changed the model: the copy is an oracle of its own
    assert [calls >= LEAST_CALLS for calls in executed(one_rank.engines[4])] == [True]
    assert "fp8 by block" in one_rank.log


def test_second_start_measures_nothing(one_rank: Run) -> None:
    (cold, timed), (warm, timed_again), _ = summaries(one_rank.log)
    assert timed > 0
    assert timed_again == 0
    assert cold == warm


def test_one_line_says_what_serves_each_bucket_and_where_it_came_from(one_rank: Run) -> None:
    lines = re.findall(
        r"\] (2 x \(8 experts top-2, hidden 128, intermediate 64, fp32, tp 1 ep 1\), first model\.layers\.0\..*)", one_rank.log
    )
    assert len(lines) == 2  # one distinct shape, two starts
    assert "[tuned now]" in lines[0]
    assert "[store]" not in lines[0]
    assert "[tuned now]" not in lines[1]
    # 64 tokens a step at most: every power of two up to it, some of them merged where one tactic serves neighbours.
    assert re.search(r"eager 1(-\d+)?: ", lines[0])
    assert re.search(r"[ -]64: ", lines[0])


def test_compiled_engine_replays_what_the_store_has(drive: Drive, models: dict[str, Path], store: Path, one_rank: Run) -> None:
    """The eager engine's store serves it, as the engine's own config asks, which goes before the environment."""
    config = {"moe_dist": {"tune": "replay", "store": str(store)}}
    engine = {"model": models["plain"], "backend": "moe_dist", "enforce_eager": False, "additional_config": config}
    run = passed(drive(engine, MOE_DIST_TUNE="off"))
    assert tokens(run) == tokens(one_rank)
    assert [calls >= LEAST_CALLS for calls in executed(run.engines[0])] == [True]
    assert summaries(run.log) == [(summaries(one_rank.log)[0][0], 0)]  # the epoch of before
    assert re.search(r"0 candidates timed; replay took", run.log)


def test_reloaded_weights_are_served(drive: Drive, models: dict[str, Path], store: Path, one_rank: Run, tmp_path: Path) -> None:
    """vLLM writes them into the layers' own storage, scales as well; what was tuned goes on serving."""
    other, meant = vllm_tiny.save_block_fp8(tmp_path / "fp8", tmp_path / "meant", seed=1)
    run = passed(
        drive(
            {"model": models["dequantised"], "backend": "auto"},
            {"model": meant, "backend": "auto", "dtype": "float16"},
            {"model": models["plain"], "backend": "moe_dist", "reload": models["dequantised"]},
            {"model": models["fp8"], "backend": "moe_dist", "dtype": "float16", "reload": other},
            MOE_DIST_STORE=str(store),
        )
    )
    assert tokens(run, 2) == tokens(one_rank)
    assert run.engines[2]["reloaded"] == tokens(run, 0) != tokens(one_rank)
    assert tokens(run, 3) == tokens(one_rank, 1)
    assert run.engines[3]["reloaded"] == tokens(run, 1) != tokens(one_rank, 1)
    assert [timed for _, timed in summaries(run.log)] == [0, 0]  # and nothing is tuned anew


def test_lora_adapters_end_start_up_with_the_reason(drive: Drive, models: dict[str, Path]) -> None:
    run = drive({"model": models["plain"], "backend": "moe_dist", "enable_lora": True})
    assert run.code not in (0, -1)
    reason = "moe_backend='moe_dist' can't serve this layer: it does not run LoRA adapters; choose another --moe-backend"
    assert reason in run.log, run.log[-6000:]


def test_eplb_ends_start_up_with_the_reason(drive: Drive, models: dict[str, Path]) -> None:
    engine = {
        "model": models["plain"],
        "backend": "moe_dist",
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
    }
    run = drive(engine, WITNESS_EPLB="1")
    assert run.code not in (0, -1)
    assert "moe_dist keeps each expert where it was loaded, so it can't run with EPLB (--enable-eplb)" in run.log, run.log[-6000:]


def test_layers_that_we_do_not_serve_run_vllm_s_own_experts_where_that_is_set(drive: Drive, models: dict[str, Path], one_rank: Run) -> None:
    run = passed(drive({"model": models["plain"], "backend": "moe_dist"}, WITNESS_REFUSE="1", MOE_DIST_UNSERVED="native"))
    assert tokens(run) == tokens(one_rank)
    assert not executed(run.engines[0])
    said = "moe_dist leaves layers to vLLM's own experts: Unquantized MoE backend moe_dist does not support .* does not serve this layer, says the test"
    assert len(re.findall(said, run.log)) == 1  # of two layers alike
    assert re.search(r"0 layers serve epoch .* 0 candidates timed", run.log)


def test_the_doctor_s_command_tunes_ahead_for_the_engine(drive: Drive, models: dict[str, Path], one_rank: Run, tmp_path: Path) -> None:
    """Run as it is printed: the engine's keys are the launcher's, so its first start finds all of its cells."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}

    def doctor() -> str:
        command = ["moe-dist", "doctor", "vllm", "--model", models["plain"], "--max-tokens", "64", "--store", tmp_path / "ahead"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=env).stdout

    said = doctor()
    assert "plugin: vLLM loads it in every process" in said
    assert f"tuned: {tmp_path / 'ahead'} holds no epoch of any vLLM deployment" in said
    (command,) = re.findall(r"torchrun --nproc-per-node=1 -m moe_dist\.tune .*", said)
    subprocess.run(command.split(), check=True, timeout=600, env=env)
    run = passed(drive({"model": models["plain"], "backend": "moe_dist"}, MOE_DIST_STORE=str(tmp_path / "ahead")))
    ((epoch, timed),) = summaries(run.log)
    assert timed == 0
    assert tokens(run) == tokens(one_rank)
    assert re.search(rf"tuned: vllm:.*:tp1-pp1-dp1:stage0: epoch \d+ \({epoch}\) with 7 eager cells", doctor())


def test_vllm_s_own_experts_are_the_default_tactic(drive: Drive, models: dict[str, Path], one_rank: Run) -> None:
    """Tuning is off, so what serves is the default: not ours, though ours are there."""
    run = passed(drive({"model": models["plain"], "backend": "moe_dist"}, WITNESS_NATIVE="1", MOE_DIST_TUNE="off"))
    assert tokens(run) == tokens(one_rank)
    assert "eager 1-64: vllm(experts=PlainExperts) [default]" in run.log
    assert "2 layers run the defaults: tuning is off" in run.log


def test_own_experts_that_need_a_second_copy_are_left_out_aloud(one_rank: Run) -> None:
    # 8 experts x 3 x 64 x 128 values of 4 bytes. vLLM's CPU experts pack the weights anew.
    said = "vLLM's auto would run CPUUnquantizedExperts here, which lays the experts' weights out anew: .* a second copy of 0.8 MiB a layer"
    assert re.search(said, one_rank.log)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_give_the_tokens_of_one_and_serve_one_epoch(
    expert_parallel: bool, drive: Drive, models: dict[str, Path], store: Path, one_rank: Run
) -> None:
    engine = {"model": models["plain"], "backend": "moe_dist", "tensor_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    run = passed(drive(engine, MOE_DIST_STORE=str(store)))
    assert tokens(run) == tokens(one_rank)
    assert [calls >= LEAST_CALLS for calls in executed(run.engines[0])] == [True, True]
    (epoch, timed), (other_epoch, other_timed) = summaries(run.log)
    assert epoch == other_epoch
    assert timed == other_timed > 0  # cut or shared out, it is another problem than one rank's
    assert f"tp {1 if expert_parallel else 2} ep {2 if expert_parallel else 1}" in run.log


def test_expert_parallel_over_data_parallel_gathers_all_rows(drive: Drive, models: dict[str, Path], store: Path, one_rank: Run) -> None:
    """Two replicas with unlike batches: each rank's experts see the rows of both, and the sum is scattered back."""
    engine = {"model": models["plain"], "backend": "moe_dist", "enable_expert_parallel": True}
    run = passed(drive(engine, replicas=2, MOE_DIST_STORE=str(store), WITNESS_GATHER="1"))
    assert [tokens(run, rank) for rank in range(2)] == [tokens(one_rank)[rank:] for rank in range(2)]
    assert all(calls >= LEAST_CALLS for calls in executed(run.engines[0]))
    (epoch, timed), (other_epoch, other_timed) = summaries(run.log)
    assert epoch == other_epoch
    assert timed == other_timed
    assert "tp 1 ep 2" in run.log


def test_each_stage_of_a_pipeline_serves_its_own_layers(drive: Drive, models: dict[str, Path], one_rank: Run, tmp_path: Path) -> None:
    engine = {"model": models["plain"], "backend": "moe_dist", "pipeline_parallel_size": 2}
    run = passed(drive(engine, MOE_DIST_STORE=str(tmp_path / "store"), WITNESS_STAGES="1"))
    assert tokens(run) == tokens(one_rank)
    assert [calls >= LEAST_CALLS // 2 for calls in executed(run.engines[0])] == [True, True]
    assert sorted(re.findall(r"1 x \(8 experts .* first model\.layers\.(\d)\.", run.log)) == ["0", "1"]
    assert len(summaries(run.log)) == 2
    assert {epoch.deployment[-7:] for epoch in stored_epochs(str(tmp_path / "store"))} == {":stage0", ":stage1"}


def test_server_answers_completions(models: dict[str, Path], store: Path, one_rank: Run, tmp_path: Path) -> None:
    port = free_port()
    log, witness = tmp_path / "log.txt", tmp_path / "witness"
    command = [
        Path(sys.executable).parent / "vllm", "serve", models["plain"], "--moe-backend=moe_dist", "--served-model-name=tiny", "--dtype=float32",
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
    assert said["choices"][0]["token_ids"] == tokens(one_rank)[0]
    assert after - before >= LEAST_CALLS


def test_run_batch_and_bench_run_our_experts(models: dict[str, Path], store: Path, one_rank: Run, tmp_path: Path) -> None:
    engine = ["--model", models["plain"], "--moe-backend=moe_dist", "--dtype=float32", "--enforce-eager", "--max-model-len=128",
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
    assert said.split() == [f"t{token}" for token in tokens(one_rank)[0]]
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


def test_served_speed_is_measured_beside_stock(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`moe-dist bench vllm` over two real engines, asked in turns: what it measures on a GPU, all but drawn weights and the truth's engine."""
    for name, value in environment(tmp_path / "witness").items():
        monkeypatch.setenv(name, value)
    plan = Plan(
        process=[sys.executable, "-m", "moe_dist_vllm.bench"], model=models["plain"], dtypes=["bf16"], modes=["eager"], batches=[2], pairs=2,
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


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # Its peer is told why, at once, and its own error ends start-up too.
        ("1:raise", r"RankWithdrawn: rank 1 left the pass: RuntimeError: a fault made by the test"),
        # It says nothing: either vLLM sees the process end, or its peer the silence, a tenth of the start-up timeout.
        ("1:exit", r"RankLost: rank 1 lost in pass 1|RendezvousLost|died unexpectedly"),
    ],
)
def test_a_rank_that_fails_in_tuning_ends_start_up_with_the_reason(fault: str, reason: str, drive: Drive, models: dict[str, Path]) -> None:
    engine = {"model": models["plain"], "backend": "moe_dist", "tensor_parallel_size": 2}
    run = drive(engine, MOE_DIST_STORE="memory:", WITNESS_FAULT=fault, VLLM_ENGINE_READY_TIMEOUT_S="100")
    assert run.code not in (0, -1), run.log[-6000:]
    assert re.search(reason, run.log), run.log[-6000:]


def test_flag_is_in_the_help_of_every_command(tmp_path: Path) -> None:
    commands = [["serve"], ["bench", "throughput"], ["run-batch"]]
    vllm, env = Path(sys.executable).parent / "vllm", environment(tmp_path / "witness")
    started = [subprocess.Popen([vllm, *command, "--help=moe-backend"], stdout=subprocess.PIPE, text=True, env=env) for command in commands]
    for command, process in zip(commands, started, strict=True):
        said, _ = process.communicate(timeout=600)
        assert re.search(r"--moe-backend.*\{.*moe_dist.*\}", said, re.DOTALL), (command, said[-2000:])
        assert "Use the fastest kernel for each batch size" in " ".join(said.split()), (command, said[-2000:])  # however it is wrapped
