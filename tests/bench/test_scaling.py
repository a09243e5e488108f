"""The scaling table is made of what ranks really say: what is simulated is what real ranks' rendezvous and store count."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from torch._C._distributed_c10d import HashStore

from moe_dist.bench import scaling, servers
from moe_dist.bench.late import late_step
from moe_dist.bench.scaling import ANY, ATTACH, CASES, COLD, LATE, ON_TIME, RELOAD, TUNE, WARM
from moe_dist.bench.servers import servers_table
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.cli import bench
from moe_dist.cli.main import main
from moe_dist.distributed.converge import combine_rounds
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import pack_hits
from moe_dist.stores.open import open_store
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner

KEYS = 60


@pytest.mark.parametrize("phase", [WARM, COLD])
@pytest.mark.parametrize("size", [2, 5])  # the leader and one; more than a power of two, of which two are cold
def test_what_is_simulated_is_what_real_ranks_send(size: int, phase: str) -> None:
    counted, _ = scaling.run_processes(size, KEYS, phase)
    simulated, _ = scaling.simulate(size, KEYS, phase)
    assert (simulated.said, simulated.read) == (counted.said, counted.read)
    assert simulated.requests <= counted.requests, "a rank that waits long looks at its peers, too"


def test_real_ranks_adopt_what_the_benchmark_publishes_whatever_threads_its_own_process_has() -> None:
    """Ranks run with one thread each, which is part of where a winner holds; a user's process has as many as it has cores."""
    run = [sys.executable, "-c", "from moe_dist.bench.scaling import reload_processes; print(reload_processes(2, 4)[0].requests)"]
    ended = subprocess.run(run, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


@pytest.mark.parametrize("size", [2, 5])
def test_a_simulated_reload_is_what_real_ranks_of_one_host_send_and_read(size: int) -> None:
    counted, _ = scaling.reload_processes(size, KEYS)
    simulated, _ = scaling.simulate_reload(size, KEYS, hosts=1)
    assert (simulated.said, simulated.read) == (counted.said, counted.read)
    assert simulated.requests <= counted.requests, "a rank that waits long looks at its peers, too"
    assert 2 <= counted.store_reads <= size, "who waits too long for a rank of its host reads for itself"
    assert counted.store_bytes / counted.store_reads == simulated.store_bytes / simulated.store_reads


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_real_pass_takes_the_steps_that_tuning_is_counted_by(strategy: str, tmp_path: Path) -> None:
    rendezvous, taken = HashStore(), list[str]()
    deadlines = {"progress_timeout": timedelta(seconds=30), "cap": timedelta(seconds=60)}

    def tune(rank: int) -> None:
        group = RankGroup(rendezvous, rank, 2, **deadlines)  # type: ignore[arg-type]
        meet = group._meet
        if rank == 0:
            group._meet = lambda step, *rest: (taken.append(step), meet(step, *rest))[1]  # type: ignore[method-assign]
        policy = MeasurementPolicy(sweeps=1)
        with Tuner(store=str(tmp_path), group=group, strategy=strategy, policy=policy, ladder=BucketLadder((1, 2)), device="cpu") as tuner:
            tuner.record(SimulatedOperation("layer", {"plain": 1000.0, "quick": 100.0}))
            tuner.run_pass()

    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(tune, rank) for rank in range(2)]:
            ended.result(60)
    timed = [step for step in taken if step.startswith(("measure-", "shard-", "final-", "reload-", "spread-"))]
    if strategy == "reload":
        assert timed == ["reload-published", "spread-key", "spread-found"]
    else:
        assert len(timed) == 2 * scaling.rounds_of(strategy), "of two cells"


def test_ranks_that_hold_the_same_send_no_entry_however_many_keys() -> None:
    few, many = (scaling.simulate(64, keys, WARM)[0] for keys in (100, 300))  # answers are long words, too
    assert (few.said, few.read, few.requests) == (many.said, many.read, many.requests)


def test_a_cold_host_costs_its_entries_and_an_offer_for_each_rank() -> None:
    traffic, _ = scaling.simulate(64, KEYS, COLD)
    entries = len(pack_hits(scaling._entries(KEYS)))
    assert min(traffic.read[56:]) > entries, "eight cold ranks read the entries"
    assert max(traffic.read[1:56]) < entries, "the others read an offer without them"
    assert entries < traffic.said[0] < 2 * entries, "the first that holds them sends them once"


def test_tuning_costs_each_rank_the_same_and_apart_no_exchange_a_key() -> None:
    for strategy in ("reduce", "shard"):
        few, many = (scaling.simulate_tuning(size, KEYS, strategy)[0] for size in (64, 512))
        assert many.server_bytes / 512 == pytest.approx(few.server_bytes / 64, rel=0.1)
    few, many = (scaling.simulate_tuning(64, keys, "reload")[0] for keys in (KEYS, 10 * KEYS))
    assert few.requests == many.requests


@pytest.mark.parametrize("size", [2, 5])
def test_a_simulated_step_is_what_its_words_are_counted_as(size: int) -> None:
    """The same words by the steps that rows of tuning are counted by; what is beside them is looks, and their answers."""
    words = scaling.round_words(size)
    counted = scaling.Traffic([0] * size, [0] * size)
    counted.reduce("measure-0-0", words, combine_rounds(words, scaling.TACTICS, "max", range(size)))
    stepped, seconds = scaling.simulate_step(size, ON_TIME)
    progress = len("2")  # how far each is
    assert stepped.said == [said + progress for said in counted.said]
    assert stepped.read == counted.read
    assert counted.requests <= stepped.requests <= counted.requests + 3 * size, "a look in vain or so each"
    answers_s = stepped.requests / scaling.REQUESTS_PER_S
    assert answers_s - 1e-9 <= seconds <= answers_s + 0.02, "one after the other, and what the last one slept"


@pytest.mark.parametrize("size", [2, 8])
def test_real_ranks_ask_no_more_while_one_is_late_than_simulated_ones(size: int) -> None:
    """However late it really was: on a busy machine each sleep is longer."""
    views = [_Counted(HashStore() if rank == 0 else None) for rank in range(size)]
    deadlines = {"progress_timeout": timedelta(seconds=60), "cap": timedelta(seconds=60)}
    words, said = scaling.round_words(size), list[float]()
    groups = []
    for rank, view in enumerate(views):
        view.store = views[0].store
        groups.append(RankGroup(view, rank, size, **deadlines))  # type: ignore[arg-type]
        groups[rank].begin_pass("run_pass")

    def step(rank: int, name: str, late_s: float) -> bytes:
        if rank == size - 1:
            time.sleep(late_s)
            said.append(time.monotonic())
        return groups[rank].reduce(name, words[rank], lambda words: combine_rounds(words, scaling.TACTICS, "max", range(size)))

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: step(rank, "start", 0.0), range(size)))
        before = [view.requests for view in views]
        began = time.monotonic()
        list(pool.map(lambda rank: step(rank, "measure-0-0", 0.7), range(size)))
    for group in groups:
        group.close()
    counted = sum(view.requests - former for view, former in zip(views, before, strict=True))
    simulated = late_step(
        words, lambda words: combine_rounds(words, scaling.TACTICS, "max", range(size)), said[-1] - began, scaling.REQUESTS_PER_S
    )
    on_time = scaling.simulate_step(size, ON_TIME)[0].requests
    assert on_time < counted <= 1.25 * simulated.requests + 4 * size


class _Counted:
    """A rank's view of the rendezvous that counts its requests, whatever comes of them."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def clone(self) -> _Counted:
        return self

    def has_extended_api(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.requests += 1
            return getattr(self.store, name)(*args)

        return request


def test_a_late_rank_costs_each_rank_no_more_however_many_they_are() -> None:
    few, many = (scaling.simulate_step(size, LATE)[0] for size in (8, 64))
    assert many.requests / 64 < few.requests / 8


def test_an_error_on_a_simulated_rank_is_raised() -> None:
    def combine(words: list[bytes]) -> bytes:
        raise ValueError("no such word")

    with pytest.raises(ValueError, match="no such word"):
        late_step([b"a"], combine, 0.0, 1.0)


def test_rows_are_measured_by_processes_and_by_simulation() -> None:
    rows = scaling.scaling_table([2, 64], [20])
    agreed = (WARM, COLD, RELOAD)
    assert [(row["phase"], row["strategy"], row["ranks"], row["keys"], row["how"]) for row in rows] == [
        (phase, strategy, size, 20, "processes" if size == 2 and phase in agreed else "simulated")
        for size in (2, 64)
        for phase, strategy in CASES
    ] + [(phase, ANY, size, 1, "simulated") for size in (2, 64) for phase in (ON_TIME, LATE)]
    held = {(row["phase"], row["strategy"], row["ranks"]): row for row in rows}
    assert held[ATTACH, ANY, 64]["store_bytes"] == 64 * sum(map(len, scaling._entries(20)))
    assert held[TUNE, "reduce", 64]["limit_s"] == 20 * scaling.TIMING_S


# Seconds of a step, of which `reduce` takes four a cell, `shard` five, and timing 0.7 s; whose rounds no longer hold.
@pytest.mark.parametrize(("step_s", "broken"), [(0.13, set()), (0.15, {"shard"}), (0.18, {"reduce", "shard"})])
def test_rounds_of_timing_hold_only_if_they_do_with_looks_in_vain(step_s: float, broken: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "CASES", tuple((TUNE, strategy) for strategy in STRATEGIES))
    monkeypatch.setattr(scaling, "simulate_step", lambda size, phase: (scaling.Traffic([0] * size, [0] * size), step_s))
    rows = [row for row in scaling.scaling_table([2], [20]) if row["phase"] == TUNE]
    assert {row["strategy"] for row in rows if not row["holds"]} == broken


def test_clients_of_real_servers_are_counted() -> None:
    with RedisServer() as server:
        rows = list(servers_table(f"redis://127.0.0.1:{server.port}/0", [4, 8], keys=20))
        assert server.client().dbsize() == 0, "left as it was"
    nbytes = len(scaling.epoch_of(20)[1])
    assert [(row["server"], row["clients"], row["requests"], row["bytes"]) for row in rows] == [
        ("rendezvous", 4, 16_384, 16_384 * 64), ("redis", 4, 4, 4 * nbytes), ("redis", 8, 8, 8 * nbytes)
    ]  # fmt: skip


# When the line that begins so is said the server is struck: amid the table of ranks, between two rows of the servers, and amid a row,
# whose clients are connected and wait. It is killed, stopped, or stopped and then killed.
@pytest.mark.parametrize(
    ("at", "how", "kept", "reason"),
    [
        ("phase reload", "kill", 0, "before it was asked: "),
        ("phase reload", "stop", 0, "before it was asked: "),
        ("server redis, clients 4", "kill", 2, "while 8 clients asked it for an epoch: ConnectionRefusedError"),
        ("server redis, clients 4", "stop", 2, "while 8 clients asked it for an epoch: it sent nothing for 3 s"),
        ("server redis, clients 4", "stop, then kill", 2, "while 8 clients asked it for an epoch: "),
    ],
)
def test_a_server_that_goes_away_ends_the_command_with_a_line_and_the_rows_before_it(
    at: str, how: str, kept: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, began = tmp_path / "scaling.json", time.monotonic()
    with RedisServer() as server:

        def strike(line: str) -> None:
            if line.startswith(at) and server.process is not None:
                if how == "kill":
                    server.stop()
                    return
                server.send(signal.SIGSTOP)
                if how != "stop":
                    threading.Timer(1.0, server.process.kill).start()

        monkeypatch.setattr(bench, "note", strike)
        monkeypatch.setattr(bench, "servers_table", functools.partial(servers_table, keys=20, patience_s=3.0))
        url = f"redis://127.0.0.1:{server.port}/0"
        command = ["bench", "scaling", "--ranks", "2", "--keys", "10", "--redis", url, "--clients", "4", "8", "--json", str(path)]
        assert main(command) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"moe-dist bench: the server {url} was lost {reason}"), said
    assert said.endswith(
        f"; {len(CASES) + len(scaling.STEPS) + kept} rows before it are in {path}; see that it runs, then run this again\n"
    )
    assert said.count("\n") == 1
    assert time.monotonic() - began < 60
    held = json.loads(path.read_text())
    assert (len(held["scaling"]), len(held["servers"])) == (len(CASES) + len(scaling.STEPS), kept)
    assert held["incomplete"] in said


@pytest.mark.parametrize("how", ["closes", "refuses", "forgot", "asker killed"])
def test_an_answer_that_is_no_epoch_is_said_and_waited_for_no_longer(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that gives half an answer, one that is full, one that was started again; and a process that asks is killed as for its memory."""
    answers = {"closes": b"$100\r\nhalf", "refuses": b"-ERR max number of clients reached\r\n", "forgot": b"$-1\r\n", "asker killed": b""}
    said = {
        "closes": "it closed a connection",
        "refuses": "max number of clients reached",
        "forgot": "it answered '$-1'",
        "asker killed": "was killed",
    }

    def serve() -> None:
        near, _ = listener.accept()
        with near:
            near.recv(100)
            near.sendall(answers[how])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        where = (f"redis://127.0.0.1:{listener.getsockname()[1]}", "name")
        if how == "asker killed":
            monkeypatch.setattr(servers, "_load_in_a_process", killed)
        with pytest.raises(servers._Unanswered, match=re.escape(said[how])):
            servers._load("redis", 2, where, 20.0)


def test_a_server_that_is_slow_to_one_client_while_it_answers_another_is_not_lost() -> None:
    """Of thousands each waits for long: patience is with a server that sends nobody anything."""

    def serve() -> None:
        (first, _), (second, _) = listener.accept(), listener.accept()
        for part in (b"$3\r\na", b"b", b"c\r\n"):
            second.sendall(part)
            time.sleep(0.7)
        first.sendall(b"$0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        servers._load_redis(2, 1, (f"redis://127.0.0.1:{listener.getsockname()[1]}", "name"), lambda: None, 1.5)
    assert time.monotonic() - began > 1.5, "the first was not answered before"


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_more_clients_than_the_system_or_the_server_takes_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer("--maxclients", "20") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        assert main(["bench", "scaling", "--ranks", "2", "--keys", "10", "--redis", url, "--clients", "4", "64"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"moe-dist: the server {url} takes 20 clients at once (its maxclients, which its open files bound), and 64 are to"
        )
        assert said.endswith("or take fewer --clients\n")
        monkeypatch.setattr(servers.resource, "getrlimit", lambda which: (1024, 1024))
        assert main(["bench", "scaling", "--redis", url]) == 2
        assert capsys.readouterr().err == (
            "moe-dist: 4096 clients open 2112 files in each of 2 processes, and the limit here is 1024 (`ulimit -Hn`); raise it, or take "
            "fewer --clients\n"
        )
        assert main(["bench", "scaling", "--redis", url, "--clients", "5"]) == 2
        assert "--clients 5: two processes ask" in capsys.readouterr().err


def test_a_server_that_is_stopped_at_the_start_is_waited_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer() as server:
        server.send(signal.SIGSTOP)
        began = time.monotonic()
        assert main(["bench", "scaling", "--redis", f"redis://127.0.0.1:{server.port}/0?timeout=1"]) == 2
        assert time.monotonic() - began < 15
    said = capsys.readouterr().err
    assert said.startswith(f"moe-dist: store redis://127.0.0.1:{server.port}/0 can't be used: ")
    assert said.count("\n") == 1


def test_a_server_is_started_for_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "servers_table", functools.partial(servers_table, keys=20))
    path = tmp_path / "scaling.json"
    assert main(["bench", "scaling", "--ranks", "2", "--keys", "10", "--redis", "own", "--clients", "4", "--json", str(path)]) == 0
    held = json.loads(path.read_text())
    assert [(row["server"], row["clients"]) for row in held["servers"]] == [("rendezvous", 4), ("redis", 4)]
    assert "incomplete" not in held


def test_a_rank_holds_one_connection_to_a_store() -> None:
    with RedisServer() as server, server.client() as watcher:
        before = watcher.info("clients")["connected_clients"]
        stores = [open_store(f"redis://127.0.0.1:{server.port}/0") for _ in range(3)]
        for store in stores:
            store.put("a/b", b"value")
            assert store.get_many(store.list("a")) == {"a/b": b"value"}
        assert watcher.info("clients")["connected_clients"] == before + 3
        for store in stores:
            store.close()
