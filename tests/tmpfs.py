"""A file system that is really small, where mounting one is allowed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


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
