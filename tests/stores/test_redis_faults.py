"""What a server can do to the store. All servers are real but those that no real one can be."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import redis
from redis_server import RedisServer, free_port
from redis_urls import AT_ONCE, ENCODED, SECRET, url_of, warnings_of

import moe_dist as md
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisStore
from moe_dist.tuning.tuner import Tuner


def test_a_server_that_is_not_there_degrades_to_memory_with_one_warning_that_names_it(caplog, no_secret):
    port = free_port()
    store = open_store(f"redis://u:{ENCODED}@127.0.0.1:{port}?timeout=0.2")
    assert not store.put("x/y", b"1")
    assert not store.put("x/z", b"2")
    store.delete("x/z")
    assert store.get_many(["x/y", "x/z"]) == {"x/y": b"1"}
    assert store.list("x") == ["x/y"]
    (warning,) = warnings_of(caplog)
    assert f"store redis://127.0.0.1:{port}/0: ConnectionError" in warning.getMessage()
    assert SECRET not in repr(store) + store.degraded


def test_a_server_that_failed_is_left_alone_for_a_while():
    attempts = []

    def connect():
        attempts.append(time.monotonic())
        raise redis.ConnectionError("gone")

    store = RedisStore(connect, url="redis://fake", retry_after=timedelta(seconds=3600))
    for number in range(50):
        assert not store.put(f"x/{number}", b"1")
    assert len(attempts) == 3
    store = RedisStore(connect, url="redis://fake", retry_after=AT_ONCE)
    store.get("x/y")
    store.get("x/y")
    assert len(attempts) == 9


def test_a_failed_call_is_tried_three_times_with_growing_pauses_that_differ(monkeypatch):
    """A thousand ranks that lose a server together do not all come back in one moment."""
    pauses = []

    def failing():
        failures = [redis.ConnectionError("reset"), redis.TimeoutError("late"), OSError("no route")]

        class Client:
            def mget(self, names):
                raise failures.pop(0) if failures else AssertionError("tried a fourth time")

        return RedisStore(Client, url="redis://fake"), failures

    monkeypatch.setattr(time, "sleep", pauses.append)
    for _ in range(20):
        store, failures = failing()
        assert store.get("x/y") is None
        assert failures == []
        assert "OSError: no route" in store.degraded
    first, second = pauses[::2], pauses[1::2]
    assert all(0.0375 <= pause <= 0.0625 for pause in first)
    assert all(0.075 <= pause <= 0.125 for pause in second)
    assert len(set(first)) > 1 < len(set(second))


def test_stores_that_lost_a_server_in_one_moment_ask_it_again_at_different_times(monkeypatch):
    now_s, asked = [1000.0], [0]

    def connect():
        asked[0] += 1
        raise redis.AuthenticationError("no")  # which is not tried again

    stores = [RedisStore(connect, url="redis://fake", retry_after=timedelta(seconds=30)) for _ in range(100)]

    def at(seconds):
        now_s[0], before = 1000.0 + seconds, asked[0]
        for store in stores:
            store.get("x/y")
        return asked[0] - before

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    assert (at(0), at(22)) == (100, 0)
    early = at(30)
    assert 0 < early < 100
    assert at(38) == 100 - early


def test_a_server_that_takes_no_bytes_bounds_a_write():
    """More than the sockets' buffers hold: without a timeout the write would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = RedisStore.from_url(f"redis://127.0.0.1:{listener.getsockname()[1]}?timeout=0.1")
        began = time.monotonic()
        assert not store.put("x/y", bytes(32 << 20))
        assert time.monotonic() - began < 30
        assert "Timeout" in store.degraded
        assert len(store.get("x/y")) == 32 << 20


@pytest.mark.parametrize("kind", ["killed", "stopped", "full", "read-only"])
def test_tuning_and_serving_go_on_without_the_server(kind, caplog, tmp_path):
    """It goes in the middle of a pass. What was tuned is served, and nothing of it is lost while the process lives."""
    with RedisServer() as server:
        url = url_of(server, "timeout=0.3")

        def lose(event):
            if event.phase == "measure":
                with server.client() as client:
                    if kind == "full":
                        client.config_set("maxmemory", 1)
                    elif kind == "read-only":
                        client.replicaof("127.0.0.1", free_port())
                if kind in ("killed", "stopped"):
                    server.send(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)

        with Tuner(store=url, ladder=md.BucketLadder((1,)), device="cpu", on_progress=lose) as tuner:
            tuner.record(SimulatedOperation("layer", {"plain": 2000.0, "quick": 500.0}))
            first = tuner.run_pass()
            again = tuner.run_pass()
            assert len(tuner.epoch.winners) == 1  # whichever it is: these sleep, and a machine that is busy may find no difference
        assert (first.measured, again.measured, again.hits, again.digest) == (2, 0, 1, first.digest)
        warnings = [record.getMessage() for record in warnings_of(caplog)]
        assert [f"store redis://127.0.0.1:{server.port}/0: " in said for said in warnings] == [True]


def test_a_server_that_is_killed_and_comes_back(caplog):
    with RedisServer() as server:
        store = RedisStore.from_url(url_of(server, "timeout=1"), retry_after=AT_ONCE)
        assert store.put("x/y", b"1")
        server.stop()
        assert store.get("x/y") is None
        assert not store.put("x/z", b"2")
        assert store.get("x/z") == b"2"
        server.start()
        assert store.put("x/y", b"3")
        assert store.degraded is None
        assert RedisStore.from_url(url_of(server)).list("x") == ["x/y", "x/z"]  # what was kept is written with it
        assert store.put("x/z", b"4")
        assert RedisStore.from_url(url_of(server)).get("x/z") == b"4"
        assert len(warnings_of(caplog)) == 1


def test_a_restart_between_two_calls_is_not_noticed():
    with RedisServer() as server:
        store = open_store(url_of(server))
        assert store.put("x/y", b"1")
        server.stop()
        server.start()
        assert store.put("x/y", b"2")  # over a new connection, the pooled one was closed


def test_a_server_that_is_stopped_and_continued(caplog):
    with RedisServer() as server:
        store = RedisStore.from_url(url_of(server, "timeout=0.2"), retry_after=AT_ONCE)
        assert store.put("x/y", b"1")
        server.send(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert store.get("x/y") is None
            assert not store.put("x/z", b"2")
            waited_s = time.monotonic() - began
        finally:
            server.send(signal.SIGCONT)
        assert waited_s < 30  # two calls of at most three timeouts each, on a machine that may be busy
        assert "Timeout" in warnings_of(caplog)[0].getMessage()
        assert len(warnings_of(caplog)) == 1
        patient = open_store(url_of(server))
        assert patient.get("x/y") == b"1"


def test_a_full_server_refuses_writes_and_still_reads(caplog):
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        store = open_store(url_of(server))
        assert store.put("x/y", b"1")
        with server.client() as client:
            client.config_set("maxmemory", 1)
            assert not store.put("x/z", b"2")
            assert "OutOfMemory" in store.degraded
            assert store.get_many(["x/y", "x/z"]) == {"x/y": b"1", "x/z": b"2"}
            client.config_set("maxmemory", 0)
        assert store.put("x/z", b"3")
        assert len(warnings_of(caplog)) == 1


def test_a_read_only_replica_refuses_writes_and_still_reads(caplog):
    with RedisServer("--repl-diskless-sync-delay", "0") as master, RedisServer("--replicaof", "127.0.0.1", str(master.port)) as replica:
        assert open_store(url_of(master)).put("x/y", b"1")
        store = open_store(url_of(replica))
        until = time.monotonic() + 60
        while store.get("x/y") is None and time.monotonic() < until:
            time.sleep(0.05)
        assert store.get("x/y") == b"1"
        caplog.clear()
        assert not store.put("x/z", b"2")
        assert "ReadOnly" in store.degraded
        store.delete("x/y")
        assert store.list("x") == ["x/z"]
        assert open_store(url_of(master)).list("x") == ["x/y"]
        assert len(warnings_of(caplog)) == 1


@contextlib.contextmanager
def fake_server(reply):
    """Answers `reply` to whatever comes, or nothing at all."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    while peer.recv(1 << 16):
                        if reply:
                            peer.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.mark.parametrize(
    "reply",
    [
        f"-ERR unknown command 'AUTH', with args beginning with: '{SECRET}'\r\n".encode(),  # an old server, or a proxy, that quotes what it got
        b"HTTP/1.1 400 Bad Request\r\n\r\n",  # no server of this protocol
        b"$-5\r\n",
        b"",  # accepts and never answers
    ],
    ids=["quotes the password", "http", "nonsense", "silence"],
)
def test_a_strange_server(reply, caplog, no_secret):
    with fake_server(reply) as port:
        store = open_store(f"redis://:{ENCODED}@127.0.0.1:{port}?timeout=0.1")
        assert store.get("x/y") is None
        assert not store.put("x/y", b"1")
        assert store.list("x") == ["x/y"]
        assert SECRET not in repr(store) + store.degraded
        assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("", b":1\r\n"),  # a number, where bytes, a word or a list is due
        ("", b"$-1\r\n"),  # nothing
        ("", b"*1\r\n$1\r\nx\r\n"),  # a list, too short for a listing
        ("+sentinel", b"*1\r\n*2\r\n$4\r\nname\r\n$1\r\nm\r\n"),  # a master without an address
        ("+sentinel", b":1\r\n"),
        ("+cluster", b"*1\r\n*0\r\n"),  # slots of nobody
    ],
    ids=["number", "nothing", "short list", "sentinel", "sentinel number", "cluster"],
)
def test_an_answer_of_a_wrong_kind_reaches_no_caller(kind, reply):
    with fake_server(reply) as port:
        url = f"redis{kind}://127.0.0.1:{port}" + ("/main" if kind == "+sentinel" else "")
        store = RedisStore.from_url(f"{url}?timeout=0.05", retry_after=AT_ONCE)
        assert store.list("x") == []
        assert store.degraded
        assert not store.put("x/y", b"1")
        assert store.get_many(["x/y", "x/z"]) == {"x/y": b"1"}


def test_a_process_that_can_start_no_thread_goes_on_in_memory(monkeypatch, caplog):
    """At its limit of threads, or at its end."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "moe_dist-store":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = open_store("redis://127.0.0.1:1")
    assert not store.put("x/y", b"1")
    assert store.degraded == "RuntimeError: can't start new thread"
    assert store.get("x/y") == b"1"
    assert len(warnings_of(caplog)) == 1


def test_a_progress_callback_that_raises_is_the_callers_own():
    """What is swallowed is the server's, not the word of who waits."""
    store = RedisStore(lambda: None, url="redis://fake")

    def stop():
        raise ValueError("stop")

    with store.reporting(stop), pytest.raises(ValueError, match="stop"):
        store.get("x/y")
