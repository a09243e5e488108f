"""The rendezvous of a group in one process: ranks are threads over one store, which `make` (in conftest.py) gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moe_dist.distributed.group import RankGroup

Make = Callable[..., list[RankGroup]]


def together(ranks: list[RankGroup], action: Callable[[RankGroup], Any]) -> list[Future[Any]]:
    """`action` on every rank at once, to its end."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(action, rank) for rank in ranks]


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.exception() or future.result() for future in futures]


def one_pass(rank: RankGroup) -> list[bytes]:
    with rank.open_pass("run_pass"):
        words = rank.exchange("agree-1", b"x")
        rank.commit("table")
    return words


def opened(ranks: list[RankGroup]) -> list[RankGroup]:
    for rank in ranks:
        rank.begin_pass()
    return ranks
