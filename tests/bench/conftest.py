"""What the benchmarks' tests ask of the machine."""

from __future__ import annotations

import pytest
from tmpfs import require_small_disks


@pytest.fixture(scope="session")
def small_disks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process may mount a file system for itself here."""
    require_small_disks(tmp_path_factory.mktemp("mounts"))
