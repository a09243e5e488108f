"""A candidate that ends its process twice is not run a third time; nothing else is ever held against one."""

import json
import os
import signal
import subprocess
import sys

import pytest

from moe_dist.errors import DeviceLost
from moe_dist.tuning.journal import Journal

# argv: directory, environment, what to do inside the block; "windows" dies while it times one candidate after another
CHILD = """
import os, sys, time
from moe_dist.tuning.journal import Journal
directory, environment, key, deed = sys.argv[1:]
journal = Journal(directory, environment)
try:
    with journal.timing() if deed == "windows" else journal.running(key) as mark:
        if deed == "windows":
            for named in ("cell/of-a-longer-name", "cell/y", key):
                mark(named)
        print("inside", flush=True)
        if deed == "windows": os._exit(3)
        if deed == "exit": os._exit(3)
        if deed == "wait": time.sleep(120)
        if deed == "raise": raise RuntimeError("an orderly failure")
        if deed == "sysexit": sys.exit(4)
except RuntimeError:
    pass
"""


def start(directory, deed, key="cell/x", environment="e1"):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory), environment, key, deed], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "inside\n"
    return child


def run(directory, deed, **where):
    with start(directory, deed, **where) as child:
        return child.wait(60)


def kill(child):
    with child:
        child.send_signal(signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL


def test_two_deaths_quarantine_and_one_does_not(tmp_path):
    journal = Journal(tmp_path, "e1")
    assert journal.quarantined().get("cell/x") is None
    assert run(tmp_path, "exit") == 3
    assert journal.quarantined().get("cell/x") is None
    kill(start(tmp_path, "wait"))
    assert "it was running when its process died, at " in journal.quarantined().get("cell/x")
    assert journal.quarantined().get("cell/y") is None
    assert Journal(tmp_path, "e2").quarantined().get("cell/x") is None


@pytest.mark.parametrize("deeds", [("windows", "windows"), ("exit", "windows"), ("windows", "exit")])
def test_a_death_while_candidates_are_timed_is_that_of_the_last_one_named(tmp_path, deeds):
    journal = Journal(tmp_path, "e1")
    for deed in deeds:
        assert journal.quarantined().get("cell/x") is None
        assert run(tmp_path, deed) == 3
    reason = journal.quarantined().get("cell/x")
    assert all(str(path) in reason for path in _marks(tmp_path)), "what to remove is named"
    for named_before in ("cell/y", "cell/of-a-longer-name"):
        assert journal.quarantined().get(named_before) is None
    journal.clear()
    assert _marks(tmp_path) == []


def test_candidates_that_are_timed_to_the_end_leave_no_mark(tmp_path):
    journal = Journal(tmp_path, "e1")
    with journal.timing() as mark:
        for named in ("cell/of-a-longer-name", "cell/x"):
            mark(named)
            (path,) = _marks(tmp_path)
            assert json.loads(path.read_text())["tactic_key"] == named
    assert _marks(tmp_path) == []

    def lose_the_device():
        with journal.timing() as mark:
            mark("cell/x")
            raise DeviceLost("gone")

    with pytest.raises(DeviceLost):
        lose_the_device()
    assert len(_marks(tmp_path)) == 1, "the process ends for this candidate's sake"


@pytest.mark.parametrize("deed", ["raise", "sysexit", "pass"])
def test_an_orderly_exit_is_no_death(tmp_path, deed):
    for _ in range(2):
        run(tmp_path, deed)
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_live_process_is_no_death(tmp_path):
    run(tmp_path, "exit")
    child = start(tmp_path, "wait")
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is None
    os.kill(child.pid, signal.SIGSTOP)
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is None
    kill(child)
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is not None


def test_a_zombie_is_dead(tmp_path):
    run(tmp_path, "exit")
    child = start(tmp_path, "exit")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has fetched its status
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is not None
    child.communicate()


def test_ranks_that_die_together_are_one_death(tmp_path):
    for child in [start(tmp_path, "wait") for _ in range(3)]:
        child.kill()
        child.communicate()
    # The three were started one after another here, so that the later ones may have been born after the first mark: align them.
    _rewrite(tmp_path, started_s=lambda mark: 1.0)
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is None
    run(tmp_path, "exit")
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is not None


def test_a_recycled_pid_is_not_taken_for_alive(tmp_path):
    run(tmp_path, "exit")
    run(tmp_path, "exit")
    _rewrite(tmp_path, pid=lambda mark: os.getpid())  # alive, but not started when the marks say
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is not None


def test_deaths_before_a_reboot_count(tmp_path):
    run(tmp_path, "exit")
    _rewrite(tmp_path, boot=lambda mark: "an earlier boot", marked_s=lambda mark: 1e9)
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is None
    run(tmp_path, "exit")
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is not None


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_deaths_count_whatever_the_clock_was_set_to_in_between(tmp_path, ahead_s):
    run(tmp_path, "exit")
    _rewrite(tmp_path, wall_s=lambda mark: mark["wall_s"] + ahead_s)
    run(tmp_path, "exit")
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is not None


def test_clear_lifts_the_quarantine_and_spares_live_marks(tmp_path):
    run(tmp_path, "exit")
    run(tmp_path, "exit")
    journal = Journal(tmp_path, "e1")
    with journal.running("cell/x"):
        journal.clear()
        assert journal.quarantined().get("cell/x") is None
        assert len(list(journal.folder.iterdir())) == 1
    assert not list(journal.folder.iterdir())


def test_damaged_and_foreign_marks_are_ignored(tmp_path):
    run(tmp_path, "exit")
    run(tmp_path, "exit")
    for path in _marks(tmp_path):
        path.write_text(path.read_text()[:20])
    assert Journal(tmp_path, "e1").quarantined().get("cell/x") is None


def test_a_directory_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    journal = Journal(tmp_path / "file", "e1")
    for _ in range(2):
        with journal.running("cell/x"):
            pass
    assert journal.quarantined().get("cell/x") is None
    assert len(caplog.records) == 1
    assert str(tmp_path / "file") in caplog.text


def _marks(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def _rewrite(directory, **changes):
    for path in _marks(directory):
        mark = json.loads(path.read_text())
        path.write_text(json.dumps({**mark, **{name: change(mark) for name, change in changes.items()}}))


def test_marks_are_written_before_the_block_runs(tmp_path):
    journal = Journal(tmp_path, "e1")
    with journal.running("cell/x"):
        (path,) = _marks(tmp_path)
        assert "cell/x" in path.read_text()
