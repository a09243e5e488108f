"""A file system that is really small, where mounting one is allowed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Rank, run_ranks

from moe_dist.bench.scarcity import mount_small_disk


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[None]:
    """A new `folder` of at most `size` (as mount writes it, "128k")."""
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs is not allowed here; the simulated errors stand for it")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mounts(rank: Rank) -> None:
    folder = rank.folder / "disk"
    folder.mkdir()
    mount_small_disk(folder, 64 << 10)


def require_small_disks(folder: Path) -> None:
    """Skips where a process may not mount a file system for itself alone."""
    (outcome,) = run_ranks(_mounts, 1, folder)
    if outcome.error == "PermissionError":
        pytest.skip(f"no small disk can be mounted here: {outcome.message}")
    assert not outcome.error, outcome
