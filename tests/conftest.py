"""What all tests share: one CPU thread a process, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import os

# Several workers and their ranks share few cores; children inherit this. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
