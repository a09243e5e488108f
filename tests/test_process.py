"""Whether a process that left its name still runs, and where that can't be told."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_dist import process
from moe_dist.process import Process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running
        running.kill()


def named(pid: int) -> Process:
    return dataclasses.replace(Process.this(), pid=pid, started_s=process.started_s(pid) or 0.0)


def test_a_process_is_the_same_in_what_it_wrote() -> None:
    here = Process.this()
    assert Process.from_text(here.to_text()) == here == Process.this()
    assert here.runs() is True
    assert str(here) == f"process {os.getpid()} on host {here.host}"


def test_a_process_runs_until_it_is_killed_a_zombie_included(child: subprocess.Popen[bytes]) -> None:
    other = named(child.pid)
    assert other.runs() is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked for its end
    assert Path(f"/proc/{child.pid}").exists()
    assert other.runs() is False
    child.wait()
    assert other.runs() is False


def test_a_later_process_of_the_same_id_is_another() -> None:
    assert dataclasses.replace(Process.this(), started_s=0.0).runs() is False


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"boot": "another host, or this one before it was started again"},
        {"namespace": "pid:[1]"},  # another container of this host
        {"boot": ""},  # no /proc there
    ],
)
def test_what_is_elsewhere_can_not_be_told(elsewhere: dict[str, str]) -> None:
    assert dataclasses.replace(Process.this(), **elsewhere).runs() is None
