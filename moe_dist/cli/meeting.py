"""How the launcher's ranks meet, before anything is tuned: torch's process groups, all ranks of the job and those in step with this one.

Torch waits without a word. Who waits long says so here, and who waited in vain, or could not begin, says where, how long, why and what to do.
`tune.py` alone uses it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from moe_dist.errors import RendezvousLost, first_line
from moe_dist.settings import RankSettings, job_settings

T = TypeVar("T")
_PEERS_CAME_NOT = "start all of them together, as torchrun does: one that is started again alone is not taken back"
_OR_CORRECT = f"{_PEERS_CAME_NOT}; or correct MASTER_ADDR and MASTER_PORT, which name rank 0's host and a port that is open to all ranks"
_TORCH_ENDS_S = 5.0  # how much longer than asked torch may take to end by itself; it has waits without an end where a peer goes as it comes
_LOOK_S = 2.0  # for who is at the place where ranks meet; a name server may take far longer to say that it knows no such host
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
        raise RendezvousLost(
            f"rank {ranks.rank}: a rank was lost before the first pass ({first_line(error)}); {_PEERS_CAME_NOT}"
        ) from error
    return said  # type: ignore[return-value]


@contextlib.contextmanager
def _waiting(ranks: RankSettings, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    started, over, verdict = time.monotonic(), threading.Event(), threading.Lock()

    def say_where() -> None:
        found, _ = _look(ranks.meet_at)
        where = f"rank {ranks.rank} waits for all {ranks.world_size} ranks to meet at {ranks.meet_at}"
        if not over.is_set():
            say(f"{where}{found and f' (so far {found})'}; it gives up after {patience_s:g} s")

    def in_vain(why: str, way_out: str) -> str:
        met = f"the {ranks.world_size} ranks did not meet at {ranks.meet_at} within {patience_s:g} s"
        return f"rank {ranks.rank}: {met} ({why}); {way_out}; --cap gives them longer"

    def end() -> None:
        found, way_out = _look(ranks.meet_at)
        answers = "torch has not ended its wait by itself; what answers there may be another program: then choose another MASTER_PORT"
        if over.is_set() or not verdict.acquire(blocking=False):
            return  # the wait has ended meanwhile
        say(in_vain(found or answers, way_out or _PEERS_CAME_NOT))
        os._exit(1)  # nothing else ends a wait inside torch; nothing was begun that would have to be ended

    def settle() -> None:
        """From here on it is this thread that says how the wait ended; where `end` does already, it ends the process."""
        if not verdict.acquire(blocking=False):
            threading.Event().wait()

    timers = threading.Timer(_SAID_AFTER_S, say_where), threading.Timer(patience_s + _TORCH_ENDS_S, end)
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
        settle()
    except RuntimeError as error:  # torch's own, whatever it waited for
        settle()
        why, took_s = first_line(error), time.monotonic() - started
        if took_s < 0.9 * patience_s:
            raise RendezvousLost(_why_at_once(ranks, why, took_s)) from error
        never_reached = "while trying to connect" in why  # who serves the rendezvous, says torch
        found, way_out = _look(ranks.meet_at) if never_reached else ("", "")
        raise RendezvousLost(in_vain(found or why, way_out or _PEERS_CAME_NOT)) from error
    finally:
        over.set()
        for timer in timers:
            timer.cancel()


def _why_at_once(ranks: RankSettings, why: str, took_s: float) -> str:
    """No wait was in vain: something failed."""
    port = ranks.meet_at.rpartition(":")[2]
    if "EADDRINUSE" in why:
        return (
            f"rank {ranks.rank}: port {port} of this host is in use, and the {ranks.world_size} ranks are to meet at {ranks.meet_at}; "
            "end what uses it, which may be another rank 0, or choose another MASTER_PORT for all of them"
        )
    if "failed to listen" in why:
        return f"rank {ranks.rank}: port {port} of this host can't be listened at ({why}); choose another MASTER_PORT for all {ranks.world_size} ranks"
    way_out = "mend that, or what ended a rank as it came, of which its own output tells, and start the whole job again"
    if job_settings().restart:
        way_out = "start the whole job again: ranks that a launcher has restarted torch does not always bring together"
    return f"rank {ranks.rank}: the {ranks.world_size} ranks could not meet at {ranks.meet_at}: torch gave up after {took_s:.0f} s ({why}); {way_out}"


def _look(meet_at: str) -> tuple[str, str]:
    """What keeps this process from who serves the rendezvous now, and the way out; empty: somebody answers."""
    found: queue.Queue[tuple[str, str]] = queue.Queue()
    threading.Thread(target=lambda: found.put(_try(meet_at)), daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return found.get(timeout=_LOOK_S)
    return f"it has not answered in {_LOOK_S:g} s", _OR_CORRECT


def _try(meet_at: str) -> tuple[str, str]:
    host, _, port = meet_at.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_LOOK_S).close()
        return "", ""
    except socket.gaierror as error:
        return f"the name {host!r} is not resolved: {error.strerror}", "set MASTER_ADDR to the name or address of rank 0's host"
    except ConnectionRefusedError:
        return "nobody listens there", _OR_CORRECT
    except OSError as error:
        return f"it can't be reached: {error.strerror or error}", _OR_CORRECT
