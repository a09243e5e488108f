"""Starts real vLLM engines in processes of their own, which end inside a deadline and leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm_tiny
from vllm_drive import BEGINS, NEW_TOKENS

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a process came to. engines: as `vllm_drive.py` writes them, each with its part of the log as "log", those before the first that
    failed; log: its output and that of its workers."""

    code: int
    log: str
    engines: list[dict[str, Any]]


# 4 prompts and a longer one: prefill, then every decode step, in each of the layers. Chunked prefill may add a step.
LEAST_CALLS = vllm_tiny.LAYERS * NEW_TOKENS


def passed(run: Run) -> Run:
    assert run.code == 0, run.log[-6000:]
    return run


def executed(engine: Mapping[str, Any]) -> list[int]:
    """Calls of our experts while it generated, one number a process that made any."""
    return [calls - engine["before"].get(pid, 0) for pid, calls in engine["after"].items() if calls > engine["before"].get(pid, 0)]


def summaries(log: str) -> list[tuple[str, int]]:
    """(epoch digest, candidates timed) of each rank and start, in order."""
    return [(digest, int(timed)) for digest, timed in re.findall(r"serve epoch \d+ \((\w+)\) of .*; (\d+) candidates timed", log)]


def environment(witness: Path, **extra: str) -> dict[str, str]:
    witness.mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE / "witness"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | ENVIRONMENT | {"WITNESS_DIR": str(witness), "PYTHONPATH": path} | extra


Drive = Callable[..., Run]


def driver(new_folder: Callable[[], Path]) -> Drive:
    """`drive(*engines, deadline=seconds, replicas=1, **environment)`: the engines one after the other in one process, see `vllm_drive.py`.

    replicas: that many such processes, each a rank of data parallelism; their engines and logs stand one behind the other.
    """

    def run(*engines: dict[str, object], deadline: float = 900, replicas: int = 1, **extra: str) -> Run:
        folder = new_folder()
        spec = folder / "spec.json"
        spec.write_text(json.dumps([{name: str(v) if isinstance(v, Path) else v for name, v in engine.items()} for engine in engines]))
        processes: list[subprocess.Popen[bytes]] = []
        codes: list[int | None] = []
        until = time.monotonic() + deadline
        port = free_ports(8)
        try:
            for rank in range(replicas):
                given = extra if replicas == 1 else extra | data_parallel(rank, replicas, port)
                with (folder / f"log-{rank}.txt").open("w") as stream:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, HERE / "vllm_drive.py", spec, folder / f"out-{rank}.json"], stdout=stream, stderr=subprocess.STDOUT,
                            env=environment(folder / "witness", **given), start_new_session=True,
                        )
                    )  # fmt: skip
            while time.monotonic() < until and not any(codes := [process.poll() for process in processes]) and None in codes:
                time.sleep(0.1)
        finally:
            for process in processes:
                end_session(process)
        logs = [(folder / f"log-{rank}.txt").read_text() for rank in range(replicas)]
        code = next((code for code in codes if code), -1 if None in codes else 0)  # the others end when one fails
        engines_ran: list[dict[str, Any]] = []
        for rank, log in enumerate(logs):
            if (out := folder / f"out-{rank}.json").exists():
                parts = zip(json.loads(out.read_text()), log.split(BEGINS)[1:], strict=code == 0)
                engines_ran += [engine | {"log": part} for engine, part in parts]
        return Run(code, "\n".join(logs), engines_ran)

    return run


def vllm_command(arguments: Sequence[object], log: Path, witness: Path, deadline: float = 900, **extra: str) -> Run:
    """`vllm ARGUMENTS`, as a user types it."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "vllm"), *map(str, arguments)], stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment(witness, VLLM_ENABLE_V1_MULTIPROCESSING="1", **extra),
        )  # fmt: skip
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_session(process)
    return Run(code, log.read_text(), [])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that the system hands out by itself: vLLM counts on from the one it is told."""
    for first in random.sample(range(10_000, 30_000, count), 200):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} free ports in a row")


def data_parallel(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables by which vLLM's offline engine learns that it is one of several replicas."""
    return {
        "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(size), "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }  # fmt: skip


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process's session: an engine's workers outlive a parent that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(30)
