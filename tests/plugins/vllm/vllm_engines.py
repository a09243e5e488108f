"""Starts real vLLM engines in processes of their own, which end inside a deadline and leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    """What a process came to. engines: as `vllm_drive.py` writes them; log: its output and that of its workers."""

    code: int
    log: str
    engines: list[dict[str, object]]


def environment(witness: Path, **extra: str) -> dict[str, str]:
    witness.mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE / "witness"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | ENVIRONMENT | {"WITNESS_DIR": str(witness), "PYTHONPATH": path} | extra


Drive = Callable[..., Run]


def driver(new_folder: Callable[[], Path]) -> Drive:
    """`drive(*engines, deadline=seconds, **environment)`: the engines one after the other in one process, see `vllm_drive.py`."""

    def run(*engines: dict[str, object], deadline: float = 900, **extra: str) -> Run:
        folder = new_folder()
        spec, out, log = folder / "spec.json", folder / "out.json", folder / "log.txt"
        spec.write_text(json.dumps([{name: str(v) if isinstance(v, Path) else v for name, v in engine.items()} for engine in engines]))
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, HERE / "vllm_drive.py", spec, out], stdout=stream, stderr=subprocess.STDOUT,
                env=environment(folder / "witness", **extra), start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                end_session(process)
        text = log.read_text()
        return Run(code, text, json.loads(out.read_text()) if out.exists() else [])

    return run


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process's session: an engine's workers outlive a parent that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(30)
