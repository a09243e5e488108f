"""Runs the kernel tests under Triton's interpreter, each file in a process of its own: see interpreted/conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU, in this process")
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_are_right_under_the_interpreter(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", str(FOLDER / name)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout, done.stdout
