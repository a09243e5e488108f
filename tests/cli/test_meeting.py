"""How the launcher's ranks meet where torch does not help: a wait of its own that does not end, and a rank that is gone right after."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dist.cli import meeting
from moe_dist.cli.meeting import exchange, meet
from moe_dist.errors import RendezvousLost
from moe_dist.settings import RankSettings

STUCK = """
import sys, time
from moe_dist.cli import meeting
from moe_dist.cli.main import main
meeting._TORCH_ENDS_S = 0.3
meeting.dist.init_process_group = lambda *arguments, **more: time.sleep(600)
sys.exit(main(["tune", "--device", "cpu", "--model", "olmoe-1b-7b", "--ep", "2", "--store", "memory:", "--cap", "1"]))
"""


def test_a_wait_inside_torch_that_does_not_end_is_ended() -> None:
    """As where a single rank is started again while the one that serves the rendezvous leaves: seen to wait for ever."""
    here = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = subprocess.run([sys.executable, "-c", STUCK], env=os.environ | here, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "moe-dist: rank 1: the 2 ranks did not meet at 127.0.0.1:1 within 1 s (nobody listens there); start all of them together, as torchrun does: "
        "one that is started again alone is not taken back; or correct MASTER_ADDR and MASTER_PORT, which name rank 0's host and a port that is "
        "open to all ranks; --cap gives them longer"
    )


@pytest.mark.parametrize(
    ("restarted", "way_out"),
    [
        ("0", "mend that, or what ended a rank as it came, of which its own output tells, and start the whole job again"),
        ("1", "start the whole job again: ranks that a launcher has restarted torch does not always bring together"),
    ],
)
def test_a_meeting_that_fails_at_once_is_no_wait_in_vain(restarted: str, way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [...] Connection refused\nframes of C++")

    monkeypatch.setattr(dist, "init_process_group", refused)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarted)
    assert lost(RankSettings(rank=1, world_size=2, meet_at="host:1"), minutes=20.0) == (
        "rank 1: the 2 ranks could not meet at host:1: torch gave up after 0 s (Gloo connectFullMesh failed with [...] Connection refused); "
        + way_out
    )


def lost(ranks: RankSettings, *, minutes: float) -> str:
    with pytest.raises(RendezvousLost) as raised:
        meet(ranks, (0, 1), torch.device("cpu"), timedelta(minutes=minutes), print)
    return str(raised.value)


def test_nobody_is_said_to_wait_once_all_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes its time."""
    looked, said = threading.Event(), list[str]()

    def look(meet_at: str) -> tuple[str, str]:
        looked.set()
        time.sleep(0.2)
        return "", ""

    monkeypatch.setattr(meeting, "_look", look)
    monkeypatch.setattr(meeting, "_SAID_AFTER_S", 0.0)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **more: looked.wait(10.0))
    meet(RankSettings(rank=1, world_size=2, meet_at="host:1"), (0, 1), torch.device("cpu"), timedelta(minutes=1), said.append)
    time.sleep(0.5)
    assert said == []


@pytest.mark.parametrize("met", [True, False])
def test_a_wait_that_ends_while_its_end_is_looked_into_is_ended_once(met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was about to end a process that had met its peers, or said twice what was in vain."""
    looks, said = [threading.Event(), threading.Event()], list[str]()

    def look(meet_at: str) -> tuple[str, str]:
        mine = threading.current_thread() is threading.main_thread()
        looks[mine].set()
        if not mine:
            time.sleep(0.5)
        return "nobody listens there", ""

    def wait(*arguments: Any, **more: Any) -> None:
        assert looks[False].wait(10.0)
        if not met:
            raise RuntimeError("timed out while trying to connect")

    monkeypatch.setattr(meeting, "_look", look)
    monkeypatch.setattr(meeting, "_TORCH_ENDS_S", 0.0)
    monkeypatch.setattr(meeting.os, "_exit", lambda code: said.append(f"ended with {code}"))
    monkeypatch.setattr(dist, "init_process_group", wait)
    ranks = RankSettings(rank=1, world_size=2, meet_at="host:1")
    with contextlib.nullcontext() if met else pytest.raises(RendezvousLost, match="did not meet"):
        meet(ranks, (0, 1), torch.device("cpu"), timedelta(milliseconds=10), said.append)
    time.sleep(1.0)
    assert said == []
    assert looks[True].is_set() == (not met)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        told_by_environment(monkeypatch, rank=0, address="127.0.0.1", port=port)
        assert lost(RankSettings(rank=0, world_size=2, meet_at=f"127.0.0.1:{port}"), minutes=1.0) == (
            f"rank 0: port {port} of this host is in use, and the 2 ranks are to meet at 127.0.0.1:{port}; "
            "end what uses it, which may be another rank 0, or choose another MASTER_PORT for all of them"
        )


def test_a_port_that_can_t_be_listened_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one below 1024 where that takes a right."""

    def refused(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("The server socket has failed to listen on any local network address. code: -13, name: EACCES")

    monkeypatch.setattr(dist, "init_process_group", refused)
    assert lost(RankSettings(rank=0, world_size=2, meet_at="host:80"), minutes=1.0) == (
        "rank 0: port 80 of this host can't be listened at (The server socket has failed to listen on any local network address. code: -13, "
        "name: EACCES); choose another MASTER_PORT for all 2 ranks"
    )


def test_where_nobody_listens_is_said_and_who_would_have_to(monkeypatch: pytest.MonkeyPatch) -> None:
    told_by_environment(monkeypatch, rank=1, address="127.0.0.1", port=1)
    assert lost(RankSettings(rank=1, world_size=2, meet_at="127.0.0.1:1"), minutes=1 / 60) == (
        "rank 1: the 2 ranks did not meet at 127.0.0.1:1 within 1 s (nobody listens there); start all of them together, as torchrun does: one that "
        "is started again alone is not taken back; or correct MASTER_ADDR and MASTER_PORT, which name rank 0's host and a port that is open to all ranks; --cap gives them longer"
    )


def told_by_environment(monkeypatch: pytest.MonkeyPatch, *, rank: int, address: str, port: int) -> None:
    told = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


# What torch's own wait does not end for: it asks for the name, or for a word of what answers, again and again.
@pytest.mark.parametrize(
    ("address", "why", "way_out"),
    [
        ("no.such.host.invalid", "the name 'no.such.host.invalid' is not resolved: .+", "set MASTER_ADDR to the name or address of rank 0's host"),
        ("127.0.0.1", "torch has not ended its wait by itself; what answers there may be another program: then choose another MASTER_PORT", "start all of them .+"),
    ],
    ids=["no such host", "another program"],
)  # fmt: skip
def test_what_keeps_a_rank_from_the_rendezvous_is_said(address: str, why: str, way_out: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        here = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        code = STUCK.replace("meeting.dist.init_process_group =", "stuck =").replace(
            "meeting._TORCH", "meeting._SAID_AFTER_S = 0.2\nmeeting._LOOK_S = 30.0\nmeeting._TORCH"
        )
        ended = subprocess.run([sys.executable, "-c", code], env=os.environ | here, capture_output=True, text=True, timeout=120)
    said = [line for line in ended.stderr.splitlines() if line.startswith("moe-dist: ")]  # beside torch's own
    assert ended.returncode == 1
    waits = f"moe-dist: rank 1 waits for all 2 ranks to meet at {address}:{port}"
    assert re.fullmatch(rf"{re.escape(waits)}{rf' [(]so far {why}[)]' if 'name' in why else ''}; it gives up after 1 s", said[0]), said
    assert re.fullmatch(
        rf"moe-dist: rank 1: the 2 ranks did not meet at {re.escape(address)}:{port} within 1 s \({why}\); {way_out}; --cap gives them longer",
        said[1],
    ), said
    assert len(said) == 2


def test_a_rank_that_is_gone_right_after_the_meeting_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer\nframes of C++")

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", lost)
    group: Any = object()
    with pytest.raises(
        RendezvousLost, match=r"rank 1: a rank was lost before the first pass \(.*Connection reset by peer\); start all of them"
    ):
        exchange("mine", group, RankSettings(rank=1, world_size=2))


def test_a_rank_alone_has_nobody_to_ask() -> None:
    assert exchange("mine", None, RankSettings()) == ["mine"]
