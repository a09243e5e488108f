"""What the benchmarks' tests ask of the machine."""

from __future__ import annotations

import pytest

from moe_dist.bench.scarcity import why_no_small_disk


@pytest.fixture(scope="session")
def small_disks() -> None:
    """A process may mount a file system for itself alone here."""
    if (why := why_no_small_disk()) is not None:
        pytest.skip(f"no small disk can be mounted here: {why}")
