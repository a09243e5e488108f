"""File systems as disks and networks give them, where mounting one is allowed."""

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


@contextlib.contextmanager
def two_mounts(folder: Path) -> Iterator[tuple[Path, Path]]:
    """One directory through two mounts below `folder`, each of which has locks of its own, as two hosts have on a file system that locks
    within each host alone."""
    with tmpfs(folder, "4m"):
        for name in ("lower", "upper", "work", "one", "two"):
            (folder / name).mkdir()
        options = ",".join(f"{name}dir={folder / name}" for name in ("lower", "upper", "work"))
        mounted = []
        try:
            for name in ("one", "two"):
                command = ["mount", "-t", "overlay", "-o", f"{options},index=off", "overlay", str(folder / name)]
                if subprocess.run(command, capture_output=True).returncode:
                    pytest.skip("mounting one directory twice is not allowed here; the simulated locks stand for it")
                mounted.append(folder / name)
            yield folder / "one", folder / "two"
        finally:
            for path in mounted:
                subprocess.run(["umount", "-l", str(path)], check=True)
