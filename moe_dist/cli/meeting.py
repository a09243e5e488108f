"""How the launcher's ranks meet, before anything is tuned: torch's process groups, all ranks of the job and those in step with this one.

Torch waits without a word. Who waits long says so here, and who waited in vain says where, how long and what to do. `tune.py` alone uses it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_dist.errors import RendezvousLost, first_line
from moe_dist.settings import RankSettings

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


@contextlib.contextmanager
def _waiting(ranks: RankSettings, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    where = f"rank {ranks.rank} waits for all {ranks.world_size} ranks to meet at {ranks.meet_at}"
    line = threading.Timer(_SAID_AFTER_S, lambda: say(f"{where}; it gives up after {patience_s:g} s"))
    line.daemon = True
    line.start()
    try:
        yield
    except RuntimeError as error:  # torch's own, whatever it waited for
        raise RendezvousLost(
            f"rank {ranks.rank}: the {ranks.world_size} ranks did not meet at {ranks.meet_at} within {patience_s:g} s ({first_line(error)}); "
            "start all of them together, as torchrun does: one that is started again alone is not taken back; --cap gives them longer"
        ) from error
    finally:
        line.cancel()
