"""How the launcher's ranks meet where torch does not help: a wait of its own that does not end, and a rank that is gone right after."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
        "moe-dist: rank 1: the 2 ranks did not meet at 127.0.0.1:1 within 1 s (torch has not ended its wait by itself); start all of them "
        "together, as torchrun does: one that is started again alone is not taken back; --cap gives them longer"
    )


def test_a_meeting_that_fails_at_once_is_no_wait_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [...] Connection refused\nframes of C++")

    monkeypatch.setattr(dist, "init_process_group", refused)
    ranks = RankSettings(rank=1, world_size=2, meet_at="host:1")
    with pytest.raises(
        RendezvousLost,
        match=r"^rank 1: the 2 ranks could not meet at host:1: torch gave up after 0 s \(Gloo connectFullMesh failed with .* refused\); start the "
        r"whole job again: ranks that a launcher has restarted torch does not always bring together$",
    ):
        meet(ranks, (0, 1), torch.device("cpu"), timedelta(minutes=20), print)


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
