"""How the launcher's ranks meet, before anything is tuned: torch's process groups, all ranks of the job and those in step with this one.

Torch waits without a word. Who waits long says so here, and who waited in vain says where, how long and what to do. `tune.py` alone uses it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from moe_dist.errors import RendezvousLost, first_line
from moe_dist.settings import RankSettings

T = TypeVar("T")
_WAY_OUT = "start all of them together, as torchrun does: one that is started again alone is not taken back"
_TORCH_ENDS_S = 5.0  # how much longer than asked torch may take to end by itself; it has waits without an end where a peer goes as it comes
_SAID_AFTER_S = 10.0  # by when ranks that were started together have met, on hosts that are cold, too


def meet(
    ranks: RankSettings, group: Sequence[int], device: torch.device, patience: timedelta, say: Callable[[str], None]
) -> dist.ProcessGroup | None:
    """The ranks of `group`, which run in step with this one; None: it is alone. Other stages and replicas are other groups, and nobody
    waits for them once all have met.

    They meet in the launcher's store. Where there is none, as when ranks are started by hand, rank 0 serves it (`hosting.py`).
    RendezvousLost: somebody did not come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world_size == 1:
        return None
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with _waiting(ranks, patience.total_seconds(), say):
        dist.init_process_group(backend, timeout=patience)
        if len(group) == ranks.world_size:
            return dist.group.WORLD
        if len(group) == 1:
            return None
        # Made by its members alone: another stage may be long from here.
        met: dist.ProcessGroup = dist.new_group(list(group), timeout=patience, backend="gloo", use_local_synchronization=True)
        return met


def exchange(mine: T, group: dist.ProcessGroup | None, ranks: RankSettings) -> list[T]:
    """What each rank of `group` has to say before the first pass, in their order. A collective call. RendezvousLost: one is gone."""
    if group is None:
        return [mine]
    said: list[T | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(said, mine, group)
    except RuntimeError as error:  # torch's own, of a peer that is gone or came too late
        raise RendezvousLost(f"rank {ranks.rank}: a rank was lost before the first pass ({first_line(error)}); {_WAY_OUT}") from error
    return said  # type: ignore[return-value]


@contextlib.contextmanager
def _waiting(ranks: RankSettings, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    where = f"rank {ranks.rank} waits for all {ranks.world_size} ranks to meet at {ranks.meet_at}"

    started = time.monotonic()

    def in_vain(why: str) -> str:
        if (took_s := time.monotonic() - started) < 0.9 * patience_s:  # no wait: it failed
            return (
                f"rank {ranks.rank}: the {ranks.world_size} ranks could not meet at {ranks.meet_at}: torch gave up after {took_s:.0f} s ({why}); "
                "start the whole job again: ranks that a launcher has restarted torch does not always bring together"
            )
        return (
            f"rank {ranks.rank}: the {ranks.world_size} ranks did not meet at {ranks.meet_at} within {patience_s:g} s ({why}); {_WAY_OUT}; "
            "--cap gives them longer"
        )

    def end() -> None:
        say(in_vain("torch has not ended its wait by itself"))
        os._exit(1)  # nothing else ends a wait inside torch; nothing was begun that would have to be ended

    timers = (
        threading.Timer(_SAID_AFTER_S, lambda: say(f"{where}; it gives up after {patience_s:g} s")),
        threading.Timer(patience_s + _TORCH_ENDS_S, end),
    )
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    except RuntimeError as error:  # torch's own, whatever it waited for
        raise RendezvousLost(in_vain(first_line(error))) from error
    finally:
        for timer in timers:
            timer.cancel()
