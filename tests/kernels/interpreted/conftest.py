"""These tests run kernels: under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported) or on a GPU.

In an ordinary run without a GPU they are not collected here; `test_interpreted.py`, one folder up, runs them in a process
of its own, so that no other test meets interpreted kernels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # truth.py

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def stream() -> int:
    return 0 if INTERPRETED else torch.cuda.current_stream().cuda_stream
