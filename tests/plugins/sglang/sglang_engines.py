"""Starts SGLang in processes of its own, with deadlines, and says what came out: results, log lines, counts of our runner core."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 420  # a start takes 20 to 40 s of one core, and shares it
ENGINE = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "skip_tokenizer_init": True, "disable_cuda_graph": True, "disable_radix_cache": True, "disable_overlap_schedule": True,
    "max_total_tokens": 512, "max_running_requests": 2, "chunked_prefill_size": 16, "skip_server_warmup": True, "log_level": "info",
    "moe_runner_backend": "moe_dist",
}  # fmt: skip
PROMPTS = ([1, 2, 3, 4, 5], [9, 8, 7])
NEW_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Ended:
    """What an engine left behind. results: one a prompt; () if it never served. counts: by process, of `cpu/moe_dist_cpu.py`."""

    results: tuple[dict[str, Any], ...]
    log: str
    counts: tuple[Mapping[str, int], ...]
    returncode: int

    def found(self, pattern: str) -> list[Any]:
        """What `pattern`'s groups matched in the log, in its order."""
        return re.findall(pattern, self.log)


def environment(folder: Path, store: str = "memory:", **changes: str) -> dict[str, str]:
    """The variables of an engine's processes: CPU alone, tests' own plugin on the path, `store` for winners."""
    (folder / "counts").mkdir(parents=True, exist_ok=True)
    return {
        **os.environ, "PYTHONPATH": str(HERE / "cpu"), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_CPU_OMP_THREADS_BIND": "", "MOE_DIST_STORE": store, "MOE_DIST_TEST_COUNTS": str(folder / "counts"), **changes,
    }  # fmt: skip


def run_engine(folder: Path, model: Path, environ: Mapping[str, str], prompts: Sequence[Sequence[int]] = PROMPTS, **engine: Any) -> Ended:
    """Start, answer `prompts`, end. Keyword arguments go to SGLang's Engine, over `ENGINE`."""
    asked = {"engine": {"model_path": str(model), **ENGINE, **engine}, "prompts": prompts, "new_tokens": NEW_TOKENS}
    ranks = asked["engine"].get("tp_size", 1)
    if ranks > 1:
        environ = {**environ, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))}
    log = folder / "log"
    command = [sys.executable, str(HERE / "serve_once.py"), json.dumps(asked)]
    with (
        log.open("w") as output,
        _own_session(command, environ, output) as process,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        process.wait(START_S)
    said = log.read_text()
    answer = re.search(r"^RESULT (.*)$", said, re.MULTILINE)
    return Ended(tuple(json.loads(answer.group(1))) if answer else (), said, _counts(folder), process.returncode)


@contextlib.contextmanager
def run_server(folder: Path, model: Path, environ: Mapping[str, str], **engine: Any) -> Iterator[tuple[str, Path]]:
    """An HTTP server, once it answers: its address and its log. Ends with the block."""
    port = _free_port()
    options = {"model_path": str(model), "host": "127.0.0.1", "port": port, **ENGINE, **engine}
    arguments = [
        part
        for name, value in options.items()
        for part in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]
    log = folder / "log"
    with log.open("w") as output, _own_session([sys.executable, "-m", "sglang.launch_server", *arguments], environ, output) as process:
        deadline = time.monotonic() + START_S
        while "The server is fired up" not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", log


def post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _own_session(command: Sequence[str], environ: Mapping[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session, so that all it started ends with it."""
    process = subprocess.Popen(command, env=dict(environ), stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _counts(folder: Path) -> tuple[Mapping[str, int], ...]:
    return tuple(
        {name: int(count) for name, count in (pair.split("=") for pair in path.read_text().split())}
        for path in sorted((folder / "counts").iterdir())
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
