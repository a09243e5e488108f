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
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 420  # a start takes 10 to 40 s of one core, and shares it
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
    path = os.pathsep.join([str(HERE / "cpu"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_CPU_OMP_THREADS_BIND": "", "MOE_DIST_STORE": store, "MOE_DIST_TEST_COUNTS": str(folder / "counts"), **changes,
    }  # fmt: skip


class Engines:
    """Runs engines, one at a time, as forks of one process that has imported SGLang. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "template.log"
        self._environ = environment(folder)

    def __enter__(self) -> Engines:
        with self._log.open("w") as output:
            self._template = subprocess.Popen(
                [sys.executable, str(HERE / "serve_once.py"), "template"],
                env=self._environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, bufsize=1,
            )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        self._template.kill()
        self._template.communicate()

    def run(
        self, folder: Path, model: Path, environ: Mapping[str, str], prompts: Sequence[Sequence[int]] = PROMPTS,
        new_tokens: int = NEW_TOKENS, **engine: Any,
    ) -> Ended:  # fmt: skip
        """Start, answer `prompts`, end. Keyword arguments go to SGLang's Engine, over `ENGINE`."""
        asked, environ = _asked(model, environ, prompts, new_tokens, engine)
        assert self._template.stdin is not None
        self._template.stdin.write(json.dumps({"asked": asked, "environ": environ, "log": str(folder / "log")}) + "\n")
        pid, returncode = int(self._said()), None
        hung = threading.Timer(START_S, os.killpg, (pid, signal.SIGKILL))
        hung.start()
        try:
            returncode = int(self._said())
        finally:
            hung.cancel()
            if returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        return _ended(folder, returncode)

    def _said(self) -> str:
        assert self._template.stdout is not None
        line: str = self._template.stdout.readline()
        assert line, f"the template ended: {self._log.read_text()[-3000:]}"
        return line


def run_spawned_engine(
    folder: Path, model: Path, environ: Mapping[str, str], prompts: Sequence[Sequence[int]] = PROMPTS, **engine: Any
) -> Ended:
    """The same as SGLang itself starts it: in a new process, which spawns others."""
    asked, environ = _asked(model, environ, prompts, NEW_TOKENS, engine)
    command = [sys.executable, str(HERE / "serve_once.py"), json.dumps(asked)]
    with (
        (folder / "log").open("w") as output,
        _own_session(command, environ, output) as process,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        process.wait(START_S)
    return _ended(folder, process.returncode)


def _asked(
    model: Path, environ: Mapping[str, str], prompts: Sequence[Sequence[int]], new_tokens: int, engine: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """(what `serve_once.py` is asked, its environment: a core for each rank)."""
    if (ranks := engine.get("tp_size", 1)) > 1:
        environ = {**environ, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))}
    return {"engine": {"model_path": str(model), **ENGINE, **engine}, "prompts": prompts, "new_tokens": new_tokens}, environ


def _ended(folder: Path, returncode: int) -> Ended:
    said = (folder / "log").read_text()
    answer = re.search(r"^RESULT (.*)$", said, re.MULTILINE)
    return Ended(tuple(json.loads(answer.group(1))) if answer else (), said, _counts(folder), returncode)


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
