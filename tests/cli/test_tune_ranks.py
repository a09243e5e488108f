"""The launcher with real ranks: how they wait for each other, what they write, and how a run ends early."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from moe_dist.cli import meeting
from moe_dist.cli.main import main

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0  # of a whole run on a busy machine; a hang is longer
pytestmark = pytest.mark.timeout(300)  # some tests make two runs


def environment(**changes: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"} | changes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    arguments: list[str], size: int = 2, stderr: Callable[[int], int] = lambda rank: subprocess.PIPE, launched: bool = False
) -> Iterator[list[Any]]:
    """`size` ranks without a launcher, so that each one's exit code and output can be told apart. launched: what a launcher does for them
    is done: the store by which they meet outlives each of them."""
    port = str(free_port())
    store = TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False) if launched else None
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"} if launched else {}
    ranks: list[Any] = []
    for rank in range(size):
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "moe_dist.tune", "--device", "cpu", *(each.replace("$RANK", str(rank)) for each in arguments)],
                env=environment(
                    RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **launcher
                ),
                stdout=subprocess.PIPE,
                stderr=stderr(rank),
                text=True,
                process_group=ranks[0].pid if ranks else 0,  # one, so that one kill reaches all in the same moment
            )
        )
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
        del store


def until(what: Callable[[], object], ranks: list[Any], name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"{name} did not happen in {DEADLINE_S} s"
        assert all(process.poll() is None for process in ranks), (
            f"a rank ended before {name}: {[process.communicate() for process in ranks]}"
        )
        time.sleep(0.02)


def torchrun(*arguments: str, size: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [*launcher, "-m", "moe_dist.tune", "--device", "cpu", *arguments]


def test_sigterm_ends_a_rank_that_waits_for_its_peers_to_start(model: str) -> None:
    environ = environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    lone = subprocess.Popen(
        [sys.executable, "-m", "moe_dist.tune", "--device", "cpu", "--model", model, "--ep", "2"], env=environ, stderr=subprocess.PIPE
    )
    try:
        with socket.socket() as probe:  # its rendezvous server listens: it waits inside the start of the process group
            until(lambda: probe.connect_ex(("127.0.0.1", int(environ["MASTER_PORT"]))) == 0, [lone], "the rendezvous")
        lone.terminate()
        assert lone.wait(timeout=30.0) == -signal.SIGTERM
    finally:
        lone.kill()
        lone.communicate()


# With a launcher's store, as where it is a single rank that was started again, and by hand, where rank 0 serves it.
@pytest.mark.parametrize(("rank", "launched"), [(1, True), (0, False)])
def test_a_rank_whose_peers_do_not_come_says_where_it_waits_and_what_to_do(
    rank: int, launched: bool, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_SAID_AFTER_S", 0.1)
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if launched else None
    here = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (here | ({"TORCHELASTIC_USE_AGENT_STORE": "True"} if launched else {})).items():
        monkeypatch.setenv(name, str(value))
    assert main(["tune", "--device", "cpu", "--model", model, "--ep", "2", "--store", "memory:", "--cap", "1"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"moe-dist: rank {rank} waits for all 2 ranks to meet at 127.0.0.1:{port}; it gives up after 1 s"
    assert re.fullmatch(
        rf"moe-dist: rank {rank}: the 2 ranks did not meet at 127\.0\.0\.1:{port} within 1 s \(.+\); start all of them together, as torchrun "
        "does: one that is started again alone is not taken back; --cap gives them longer",
        said[1],
    )
    assert len(said) == 2
    del store


def test_torchrun_tunes_and_replicas_measure_nothing_again(model: str, tmp_path: Path) -> None:
    """The second run is of two replicas, each a group of its own that takes what the first published."""
    summaries = []
    for run in (1, 2):
        report = tmp_path / f"{run}.json"
        arguments = [
            "--model",
            model,
            "--ep",
            "2",
            "--dp",
            str(run),
            "--buckets",
            "1,3",
            "--store",
            str(tmp_path / "store"),
            "--json",
            str(report),
        ]
        done = subprocess.run(
            torchrun(*arguments, size=2 * run), env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        summaries.append((json.loads(report.read_text()), done.stdout))
        lines = [line for line in done.stderr.splitlines() if "moe-dist" in line]
        timed = ("1 of 2", "1 tokens"), ("2 of 2", "2-3 tokens")  # a line for each pass of the first run, by rank 0 alone; no bar
        assert len(lines) == (2 if run == 1 else 0), done.stderr
        assert all(begin in line and line.endswith(end) for line, (begin, end) in zip(lines, timed, strict=False)), lines
    (first, said_first), (second, said_second) = summaries

    assert (first["group"], first["ranks"], first["hits"], first["diverged"], first["error"]) == (None, 2, 0, 0, None)
    assert first["measured"] > len(first["keys"])  # more candidates than the default alone
    assert [(key["bucket"], key["mode"], key["source"]) for key in first["keys"]] == [
        ([1, 1], "eager", "tuned"),
        ([2, 3], "eager", "tuned"),
    ]
    assert all(key["winner_us"] > 0 and key["default_us"] > 0 for key in first["keys"])
    assert said_first.count("tuned") == 2
    assert f"measured {first['measured']} candidates, 0 hits of 2; no keys differ between 2 ranks" in said_first

    assert (second["group"], second["ranks"], second["measured"], second["hits"], second["diverged"]) == ("replica 0", 2, 0, 2, 0)
    assert {key["source"] for key in second["keys"]} == {"hit"}
    chosen = [[(key["key"], key["winner"], key["winner_us"]) for key in summary["keys"]] for summary in (first, second)]
    assert chosen[0] == chosen[1]
    same = f"measured nothing: all 2 winners came from file://{tmp_path}/store; no keys differ between 2 ranks; "
    assert sorted(line.partition(same)[0] for line in said_second.splitlines() if same in line) == ["replica 0: ", "replica 1: "]


def test_every_rank_refuses_and_one_of_a_host_says_why() -> None:
    with started(["--model", "olmoe-1b-7b", "--ep", "3"]) as ranks:
        ends = [(process.communicate(timeout=DEADLINE_S), process.returncode) for process in ranks]
    message = (
        "moe-dist: num_experts 64 is not divisible by ep_size 3; choose an ep_size that divides it, or set uneven=True (--allow-uneven)\n"
    )
    assert [(said, code) for (said, _), code in ends] == [("", 2)] * 2
    told = {rank: error for rank, ((_, error), _) in enumerate(ends) if error}
    assert told[0] == message, "the first rank of a host speaks in any case"
    assert told.get(1, "") in ("", message.replace("moe-dist:", "moe-dist: rank 1:"))  # where it came first


def test_a_store_that_one_rank_alone_can_use_is_enough_and_none_is_refused_by_all(model: str, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").touch()  # the other host's disk is no folder
    for url, codes in ((f"{tmp_path}/$RANK/store", [0, 0]), ("/proc/nosuch", [2, 2])):
        with started(["--model", model, "--ep", "2", "--buckets", "1", "--store", url]) as ranks:
            ends = [(process.communicate(timeout=DEADLINE_S), process.returncode) for process in ranks]
        assert [code for _, code in ends] == codes, ends
        if codes == [0, 0]:
            assert f"kept in file://{tmp_path}/0/store" in ends[0][0][0], ends
            assert "Not a directory" in ends[1][0][1], ends
        else:
            # Whichever is first says it: a launcher may end the other.
            assert re.search(r"moe-dist: (rank 1: )?store file:///proc/nosuch can't be used: ", ends[0][0][1] + ends[1][0][1]), ends


MANY = ",".join(map(str, range(1, 101)))  # buckets: more than a run gets through before its signal


def test_ranks_that_were_asked_for_different_models_refuse_before_anything_is_tuned(model: str, tmp_path: Path) -> None:
    small = json.loads(Path(model).read_text())
    for rank, experts in enumerate((8, 4)):
        (tmp_path / f"model-{rank}.json").write_text(json.dumps(small | {"num_experts": experts}))
    with started(["--model", str(tmp_path / "model-$RANK.json"), "--ep", "2", "--store", str(tmp_path / "store")]) as ranks:
        said = [process.communicate(timeout=DEADLINE_S)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [2, 2]
    assert re.search(
        r"moe-dist: (rank 1: )?the ranks were asked for different problems: rank 0: --model \S+model-0.json \(problem [0-9a-f]{8}\); "
        r"rank 1: --model \S+model-1.json \(problem [0-9a-f]{8}\); give all of them the same model, in the same form",
        said[0] + said[1],
    ), said
    assert not list((tmp_path / "store").rglob("entries/*"))


def test_a_mistake_that_only_rank_1_finds_is_said(model: str, tmp_path: Path) -> None:
    other = tmp_path / "model-0.json"
    other.write_text(Path(model).read_text())
    with started(["--model", str(tmp_path / "model-$RANK.json"), "--ep", "2", "--store", "memory:"]) as ranks:
        said = ranks[1].communicate(timeout=DEADLINE_S)[1]
        assert ranks[1].returncode == 2
    assert said == f"moe-dist: rank 1: model '{tmp_path}/model-1.json': no such file or folder\n"


def test_no_write_tunes_and_leaves_the_store_as_it_was(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    store, asked = tmp_path / "store", ["tune", "--device", "cpu", "--model", model, "--buckets", "1", "--policy", "eager"]
    asked += ["--store", str(store)]
    assert main([*asked, "--no-write"]) == 0
    assert "kept nowhere (--no-write)" in capsys.readouterr().out
    assert "nobody can join" not in caplog.text  # nobody was to
    assert not store.exists()
    assert main(asked) == 0
    held = {path: path.read_bytes() for path in store.rglob("*+value")}
    assert main([*asked, "--no-write"]) == 0
    assert "measured nothing: the one winner came from read-only:file:" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in store.rglob("*+value")} == held


@pytest.mark.parametrize("strategy", ["reduce", "reload"])
def test_what_a_budget_left_untimed_is_named_with_that_reason(strategy: str, model: str, tmp_path: Path) -> None:
    """The store has the winner of the first bucket, so that the run is a success, on all ranks."""
    report = tmp_path / "report.json"
    arguments = ["--model", model, "--ep", "2", "--store", str(tmp_path / "store"), "--strategy", strategy, "--json", str(report)]
    with started([*arguments, "--buckets", "1"]) as ranks:
        assert [(process.communicate(timeout=DEADLINE_S), process.returncode)[1] for process in ranks] == [0, 0]
    assert [key["untimed"] for key in json.loads(report.read_text())["keys"]] == [None]
    with started([*arguments, "--buckets", "1,3,4", "--budget", "1e-5"]) as ranks:
        (said, complained), *_ = ends = [process.communicate(timeout=DEADLINE_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], ends
    ended = "the time budget ended before it was timed to the end"
    assert [(key["mode"], key["bucket"], key["source"], key["untimed"]) for key in json.loads(report.read_text())["keys"]] == [
        ("eager", [1, 1], "hit", None), ("eager", [2, 3], "untimed", ended), ("eager", [4, 4], "untimed", ended)
    ]  # fmt: skip
    assert re.search(rf"^ +2-3 +\(the default, untimed: {ended}\) *$", said, re.MULTILINE), said
    assert "1 hit of 3; 2 without a winner; no keys differ between 2 ranks" in said
    assert "moe-dist: 2 of 3 cells have no winner (eager at 2-3, 4 tokens): the budget of 1e-05 s" in complained


def committed(store: Path) -> list[Path]:
    return list((store / "epochs").glob("*/*+value")) if store.exists() else []


def test_sigterm_ends_every_rank_and_keeps_what_was_committed(model: str, tmp_path: Path) -> None:
    store, report = tmp_path / "store", tmp_path / "report.json"
    arguments = ["--model", model, "--ep", "2", "--buckets", MANY, "--store", str(store), "--json", str(report)]
    with started(arguments) as ranks:
        until(lambda: len(committed(store)) > 1, ranks, "the second commit")  # the first one's pass is then over, and in the report
        os.killpg(ranks[0].pid, signal.SIGTERM)
        ends = [(process.communicate(timeout=30.0), process.returncode) for process in ranks]
    assert [code for _, code in ends] == [128 + signal.SIGTERM] * 2
    assert ends[0][0][1].endswith("\nmoe-dist: ended by SIGTERM\n")
    assert all("candidates timed" in line for line in ends[0][0][1].splitlines()[:-1])
    assert "moe-dist" not in ends[1][0][1]
    summary = json.loads(report.read_text())
    assert (summary["error"], summary["diverged"]) == ("ended by SIGTERM", None)
    assert 1 <= len(summary["keys"]) < 100
    assert f"{len(summary['keys'])} of 100 buckets were committed and stay" in ends[0][0][0]

    # A new run finds all that was committed.
    done = [*summary["keys"]]
    again = ["--model", model, "--ep", "2", "--buckets", MANY, "--store", str(store), "--json", str(report)]
    with started(again) as ranks:
        until(lambda: len(committed(store)) > len(done), ranks, "a commit beyond the first run's")
        os.killpg(ranks[0].pid, signal.SIGTERM)
        for process in ranks:
            process.communicate(timeout=30.0)
    found = json.loads(report.read_text())["keys"][: len(done)]
    assert [(key["key"], key["winner"], key["source"]) for key in found] == [(key["key"], key["winner"], "hit") for key in done]


def processes_of(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (folder / "cmdline").read_text() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def test_ctrl_c_on_torchrun_ends_its_ranks(model: str, tmp_path: Path) -> None:
    store, report = tmp_path / "store", tmp_path / "report.json"
    arguments = ["--model", model, "--ep", "2", "--buckets", MANY, "--store", str(store), "--json", str(report)]
    agent = subprocess.Popen(
        torchrun(*arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: committed(store), [agent], "the first commit")
        os.killpg(agent.pid, signal.SIGINT)  # what a terminal does
        agent.communicate(timeout=30.0)
        assert agent.returncode != 0
        # The agent tells its ranks one after the other: the first may leave before the second has heard.
        assert re.search(r"ended by SIGINT|rank 1 left the pass: Interrupted: SIGINT", json.loads(report.read_text())["error"])
        assert not processes_of(str(store))
    finally:
        for left in processes_of(str(store)):
            os.kill(left, signal.SIGKILL)
        agent.communicate()


@pytest.mark.parametrize("killed", [1, 0])  # rank 0 speaks for both; where it is gone, who is left does
def test_survivor_of_a_killed_rank_ends_and_names_it(killed: int, model: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["--model", model, "--ep", "2", "--buckets", MANY, "--store", str(store), "--progress-timeout", "3"]
    with started(command, launched=killed == 0) as ranks:
        until(lambda: len(committed(store)) > 1, ranks, "the second commit")  # the first one's pass is then over, and in the report
        ranks[killed].kill()
        said, complained = ranks[1 - killed].communicate(timeout=60.0)
        assert ranks[1 - killed].returncode == 1
    assert f"moe-dist: rank {killed} lost in pass" in complained
    assert "no progress for 3 s" in complained
    assert ("buckets were committed and stay" in said) == (killed == 1)


# launched: without a launcher rank 0 serves the rendezvous, and stays until the other group has ended.
@pytest.mark.parametrize(("inside", "between", "name", "launched"), [("--ep", "--pp", "stage", True), ("--tp", "--dp", "replica", False)])
def test_a_stage_and_a_replica_wait_for_no_other(model: str, tmp_path: Path, inside: str, between: str, name: str, launched: bool) -> None:
    stores = [tmp_path / f"store-{rank}" for rank in range(4)]  # each rank's own: what group 1 commits is seen apart, and nobody reuses it
    arguments = ["--model", model, inside, "2", between, "2", "--buckets", "1,2,3,4,5,6", "--store", f"{tmp_path}/store-$RANK"]
    with started([*arguments, "--progress-timeout", "10"], size=4, launched=launched) as ranks:
        until(lambda: committed(stores[0]) and committed(stores[2]), [], "the first commit of both groups")
        ranks[3].kill()
        said, complained = ranks[0].communicate(timeout=DEADLINE_S)
        assert ranks[0].returncode == 0, complained
        assert re.search(
            rf"^{name} 0: 8 experts, top-2, (?s:.*)^{name} 0: measured \d+ candidates, 0 hits of 6; no keys differ between 2 ranks; .* kept in file:",
            said,
            re.MULTILINE,
        )
        theirs, complained = ranks[2].communicate(timeout=DEADLINE_S)
        assert ranks[2].returncode in (0, 1), "its own group ends too, lost or done before"
    assert "rendezvous" not in complained, "which outlives rank 0's group"
    assert re.search(rf"^{name} 1: ", theirs)
    assert (ranks[2].returncode == 1) == (f"moe-dist: {name} 1: " in complained), "rank 2 speaks for a group without rank 0"


def test_four_ranks_tune_as_one_group_and_show_progress_on_the_terminal_of_rank_0_alone(model: str, tmp_path: Path) -> None:
    """Experts shared out unevenly, and each cut in two: no two ranks hold the same."""
    seven = tmp_path / "seven.json"
    seven.write_text(json.dumps(json.loads(Path(model).read_text()) | {"num_experts": 7}))
    terminals = [os.openpty() for _ in range(4)]
    shown = [bytearray() for _ in terminals]

    def drain(rank: int) -> None:
        # A terminal that nobody reads blocks its writer. Reading ends with an error when the last writer is gone.
        with contextlib.suppress(OSError):
            while piece := os.read(terminals[rank][0], 1 << 12):
                shown[rank] += piece

    arguments = ["--model", str(seven), "--tp", "2", "--ep", "2", "--allow-uneven", "--buckets", "1,4", "--store", str(tmp_path / "store")]
    with started(arguments, size=4, stderr=lambda rank: terminals[rank][1]) as ranks:
        readers = [threading.Thread(target=drain, args=(rank,)) for rank in range(4)]
        for (_, inside), reader in zip(terminals, readers, strict=True):
            os.close(inside)
            reader.start()
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
        codes = [process.returncode for process in ranks]
    for (outside, _), reader in zip(terminals, readers, strict=True):
        reader.join(DEADLINE_S)
        os.close(outside)
    assert codes == [0] * 4, shown
    assert b"tokens, eager" in shown[0]
    assert shown[1:] == [b""] * 3
    assert said[0].startswith("7 experts, top-2, hidden 64, intermediate 32, fp32; tp 2, ep 2\n")
    assert "0 hits of 2; no keys differ between 4 ranks" in said[0]
    assert said[1:] == [""] * 3
