"""Ranks of a group in one process, for the tests that look at every wait and every word."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from distributed.in_threads import Make
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed.group import RankGroup


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(count, store=...)`: ranks of a group over one store, all or `count` of `of` from `first`; they are closed at the end."""
    made: list[RankGroup] = []

    def ranks(
        count: int, store: Any = None, *, of: int = 0, first: int = 0, progress: float = 1.0, cap: float = 20.0, **settings: Any
    ) -> list[RankGroup]:
        store, deadlines = store or HashStore(), {"progress_timeout": timedelta(seconds=progress), "cap": timedelta(seconds=cap)}
        made.extend(RankGroup(store, rank, of or count, **deadlines, **settings) for rank in range(first, first + count))
        return made[-count:]

    yield ranks
    for group in made:
        group.close()
