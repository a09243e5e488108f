"""compute-sanitizer over the kernels: memcheck is clean, and racecheck reports the pairs that docs/kernels.md explains and no other.

    python -m pytest -m gpu tests/kernels/test_sanitizer_gpu.py

Three minutes at most with a cold kernel cache, a few GB of the card. What is known was seen on an H200, with nvcc 13.0 and triton 3.6.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from sanitizer import FOLDER, known_pairs, run, run_cases

MISSING = [tool for tool in ("compute-sanitizer", "nvcc") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} on PATH; both come with the CUDA toolkit"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="the warp-specialised products are written in the instructions of compute capability 9.0",
    ),
]
# What an API call returns is torch's to judge, which raises; it asks for some things that it can do without. Allocations stand apart, so that
# what passes the end of one does not land in the next.
MEMCHECK = ["--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no", "--padding", "4096"]


def test_memcheck_finds_nothing_in_any_path() -> None:
    """Every result right, too: a tool that changes timing that much is a test of its own."""
    said = run_cases(MEMCHECK, "all")
    assert said.count("ERROR SUMMARY") == 0, said.tool[-3000:]
    assert said.rc == 0, said.child[-3000:]
    assert "23 of 23 cases right, 8 specialised" in said.child, said.child[-3000:]


def test_memcheck_finds_what_is_planted() -> None:
    """One store of 4 bytes past the end of a tensor, in a process that is watched as the cases are."""
    said = run_cases(MEMCHECK, "planted")
    assert said.count("ERROR SUMMARY") >= 1
    assert said.rc != 0
    assert "Invalid __global__ write of size 4 bytes" in said.tool, said.tool[-3000:]
    assert "planted_kernel" in said.tool


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("control") / "racecheck_control"
    subprocess.run(
        ["nvcc", "-O2", "-lineinfo", "-arch=sm_90a", str(FOLDER / "racecheck_control.cu"), "-o", str(built)], check=True, timeout=100
    )
    return built


@pytest.mark.parametrize(
    ("case", "reported"),
    [
        pytest.param(0, True, id="no barrier: racy"),
        pytest.param(1, False, id="barrier of the block"),
        pytest.param(2, False, id="named barrier of all"),
        pytest.param(3, False, id="mbarrier, every writer arrives"),
        # Right code, and the form of our products: while this is reported, so are they, and known_pairs() is needed.
        pytest.param(4, True, id="mbarrier, one arrives for its named barrier"),
        pytest.param(5, True, id="mbarrier, read before the wait: racy"),
        pytest.param(6, True, id="mbarrier, one arrives for nobody: racy"),
    ],
)
def test_what_racecheck_says_of_races_that_are_known(case: int, reported: bool, control: Path) -> None:
    said = run(["--tool", "racecheck", "--racecheck-report", "all"], [str(control), str(case)], timeout_s=60)
    assert f"case {case}: " in said.child, said.child
    assert (said.count("RACECHECK SUMMARY") > 0) is reported, said.tool[-3000:]


def test_racecheck_reports_known_pairs_of_the_specialised_products_alone() -> None:
    said = run_cases(
        ["--tool", "racecheck", "--racecheck-report", "analysis", "--kernel-name", "kernel_substring=product_kernel"], "specialised"
    )
    assert said.rc == 0, said.child[-3000:]
    assert "8 of 8 cases right, 8 specialised" in said.child, said.child[-3000:]
    found = said.pairs()
    assert found, "nothing is reported where one arrives for all: were the products watched?"
    assert found <= known_pairs(), (found - known_pairs(), said.tool[-6000:])
