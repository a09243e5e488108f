"""How long a call may wait for a server that says nothing: three timeouts, however many hosts the URL names and whatever is waited for.

Times are compared with what an unbounded call would take, many times as long, since the machine may be busy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import threading
import time
from datetime import timedelta

import pytest
import redis
from redis_server import RedisServer
from redis_urls import AT_ONCE

from moe_dist.stores import seeds
from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisStore
from moe_dist.stores.seeds import GivenUp, Workers


@contextlib.contextmanager
def silent_hosts(count):
    """Sockets that take connections and never say a word."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)


@contextlib.contextmanager
def quicker_than(seconds):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def make_cluster_of(server):
    """The server is all of it."""
    with server.client() as node:
        node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        until = time.monotonic() + 60
        while node.execute_command("CLUSTER INFO")["cluster_state"] != "ok" and time.monotonic() < until:
            time.sleep(0.02)


@pytest.mark.parametrize("url", ["redis+sentinel://{hosts}/main", "redis+cluster://{hosts}"], ids=["sentinel", "cluster"])
def test_fifty_silent_hosts_take_no_longer_than_one(url):
    with silent_hosts(50) as hosts:
        store = open_store(url.format(hosts=hosts) + "?timeout=0.3")
        with quicker_than(10):  # in turn, a single attempt is 15 s
            assert store.get("x/y") is None
        assert "Timeout" in store.degraded
        assert len(store.degraded) < 1000


def test_one_that_answers_is_found_among_silent_ones(tmp_path):
    """In turn, each of them would take its whole timeout."""
    with silent_hosts(5) as hosts, RedisServer("--cluster-enabled", "yes") as server:
        make_cluster_of(server)
        store = open_store(f"redis+cluster://{hosts},127.0.0.1:{server.port}?timeout=30")
        with quicker_than(25):
            assert store.put("x/y", b"1")

        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor main 127.0.0.1 {server.port} 1\n")
        with RedisServer(str(config), "--sentinel", mode="sentinel") as sentinel:
            store = open_store(f"redis+sentinel://{hosts},127.0.0.1:{sentinel.port}/main?timeout=30")
            with quicker_than(25):
                assert store.put("x/z", b"2")


def test_a_name_that_nobody_resolves(monkeypatch):
    ended = threading.Event()

    def resolve(*args, **options):
        ended.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        for scheme, path in (("redis", ""), ("redis+sentinel", "/main"), ("redis+cluster", "")):
            store = open_store(f"{scheme}://redis.example{path}?timeout=0.2")
            with quicker_than(30):
                assert not store.put("x/y", b"1")
                assert store.get("x/y") == b"1"
            assert store.degraded == "TimeoutError: no answer within 0.6 s"
    finally:
        ended.set()


@pytest.mark.parametrize("kind", ["", "+sentinel", "+cluster"], ids=["plain", "sentinel", "cluster"])
def test_a_trip_that_was_given_up_never_sends_what_it_carries(kind, tmp_path, monkeypatch):
    """It waits for a resolver, and goes on when a newer value was acknowledged, and when a newer value was deleted."""
    real, hold, go_on, held = socket.getaddrinfo, threading.Event(), threading.Event(), []

    def resolve(*args, **options):
        if hold.is_set():
            held.append(threading.current_thread())
            go_on.wait(120)
        return real(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(*(["--cluster-enabled", "yes"] if kind == "+cluster" else [])))
        url = f"redis{kind}://127.0.0.1:{server.port}"
        if kind == "+cluster":
            make_cluster_of(server)
        elif kind == "+sentinel":
            (tmp_path / "sentinel.conf").write_text(f"sentinel monitor main 127.0.0.1 {server.port} 1\n")
            sentinel = stack.enter_context(RedisServer(str(tmp_path / "sentinel.conf"), "--sentinel", mode="sentinel"))
            url = f"redis{kind}://127.0.0.1:{sentinel.port}/main"
        patient = open_store(f"{url}?timeout=30")
        for late in (lambda store: store.put("x/y", b"late"), lambda store: store.delete("x/y")):
            store = RedisStore.from_url(f"{url}?timeout=0.3", retry_after=AT_ONCE)
            until = time.monotonic() + 60
            while not store.put("x/y", b"first") and time.monotonic() < until:
                pass
            with server.client() as node:
                node.execute_command("CLIENT", "KILL", "TYPE", "normal")
            assert patient.put("x/y", b"second")
            hold.set()
            late(store)
            hold.clear()
            assert store.degraded
            assert held
            assert patient.put("x/y", b"newest")
            go_on.set()
            for thread in held:
                thread.join(60)
                assert not thread.is_alive()
            assert patient.get("x/y") == b"newest"
            held.clear()
            go_on.clear()


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        (b"+PONG\r\n", True),
        (b"-NOAUTH Authentication required.\r\n", True),
        (b"\x15\x03\x01\x00\x02\x02\x16", False),  # an alert of TLS
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", False),  # hangs up
        (None, False),  # waits
    ],
    ids=["pong", "no login", "tls", "http", "hangs up", "silence"],
)
def test_a_host_is_one_in_plain_text_by_its_first_word_and_in_its_own_time(answer, plain):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()

        def serve():
            peer, _ = listener.accept()
            with peer:
                peer.recv(6)
                if answer is None:
                    over.wait(60)
                else:
                    peer.sendall(answer)

        over = threading.Event()
        threading.Thread(target=serve, daemon=True).start()
        ask = functools.partial(seeds.plain_host, host, port, 0.2 if answer is None else 60.0)
        try:
            if plain:
                assert Workers().within(60.0, ask) == f"{host}:{port}"
            else:
                with pytest.raises(OSError, match="no answer in plain text" if answer is not None else "timed out"):
                    Workers().within(30.0, ask)
        finally:
            over.set()


def test_a_host_is_asked_without_tls_within_the_time_of_the_trip(monkeypatch):
    """Where its name is not resolved, its own timeout bounds nothing."""
    over = threading.Event()
    monkeypatch.setattr(seeds, "plain_host", lambda *_: over.wait(60))

    def connect():
        raise redis.TimeoutError("Timeout connecting to server")

    store = RedisStore(connect, url="rediss://fake", timeout=timedelta(seconds=0.1), tls=[("fake", 1)])
    try:
        with quicker_than(30):
            assert store.get("x/y") is None
    finally:
        over.set()
    assert store.degraded == "TimeoutError: Timeout connecting to server"


def test_what_has_no_time_is_not_begun():
    begun, workers = [], Workers()
    for limit_s in (0.0, -1.0):
        with pytest.raises(GivenUp):
            workers.within(limit_s, lambda: begun.append(1))
    assert workers.within(60.0, lambda: begun) == []


def test_calls_in_turn_share_a_thread_and_calls_at_once_do_not():
    workers, inside = Workers(), threading.Barrier(3)
    assert len({workers.within(60.0, threading.current_thread) for _ in range(20)}) == 1

    def call():
        inside.wait(60)
        return threading.current_thread()

    callers = [threading.Thread(target=lambda: found.append(workers.within(60.0, call))) for _ in range(2)]
    found = []
    for caller in callers:
        caller.start()
    found.append(workers.within(60.0, call))
    for caller in callers:
        caller.join(60)
    assert len(set(found)) == 3


def test_a_call_that_was_given_up_keeps_its_thread_and_answers_no_other():
    workers, go_on, held = Workers(), threading.Event(), []

    def late():
        held.append(threading.current_thread())
        go_on.wait(60)
        return "late"

    with pytest.raises(GivenUp):
        workers.within(0.2, late)
    other = workers.within(60.0, threading.current_thread)
    go_on.set()
    held[0].join(60)
    assert not held[0].is_alive()
    assert other is not held[0]
    assert [workers.within(60.0, lambda at=at: at) for at in range(20)] == [*range(20)]


def test_a_thread_that_nobody_calls_ends(monkeypatch):
    """In the moment that it is called again, too: none of these calls is lost."""
    monkeypatch.setattr(seeds, "_IDLE_S", 0.0005)
    workers, found = Workers(), set()
    for at in range(300):
        said, thread = workers.within(60.0, lambda at=at: (at, threading.current_thread()))
        assert said == at
        found.add(thread)
        time.sleep(0.0005)
    for thread in found:
        thread.join(60)
        assert not thread.is_alive()
    assert workers.within(60.0, threading.current_thread) not in found


def test_a_thread_that_was_taken_waits_for_its_call(monkeypatch):
    """However long its caller takes to make it."""
    monkeypatch.setattr(seeds, "_IDLE_S", 0.01)
    calls, answers = queue.SimpleQueue(), queue.SimpleQueue()
    thread = threading.Thread(target=seeds._work, args=(calls, []), daemon=True)
    thread.start()
    time.sleep(0.1)
    calls.put((lambda: "answer", answers.put))
    assert answers.get(timeout=60) == ("answer", None)
    calls.put(None)
    thread.join(60)
    assert not thread.is_alive()


def test_a_store_that_is_closed_leaves_no_thread(monkeypatch):
    monkeypatch.setattr(seeds, "_IDLE_S", 3600.0)
    before = set(threading.enumerate())
    with RedisServer() as server:
        store = open_store(f"redis://127.0.0.1:{server.port}?timeout=20")
        assert store.put("x/y", b"1")
        store.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
            assert not thread.is_alive()


def test_a_fork_takes_no_threads_along(monkeypatch):
    monkeypatch.setattr(seeds, "_IDLE_S", 3600.0)
    workers = Workers()
    assert workers.within(60.0, lambda: "here") == "here"
    if (child := os.fork()) == 0:
        try:
            os._exit(7 if workers.within(10.0, lambda: "there") == "there" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert workers.within(60.0, lambda: "here") == "here"
    workers.dismiss()


def test_a_cluster_that_is_gone_is_looked_for_at_every_seed():
    """At those, too, that were no part of it when the client was made."""
    with RedisServer("--cluster-enabled", "yes") as first, RedisServer("--cluster-enabled", "yes") as second:
        make_cluster_of(first)
        url = f"redis+cluster://127.0.0.1:{first.port},127.0.0.1:{second.port}?timeout=20"
        store = RedisStore.from_url(url, retry_after=AT_ONCE)
        assert store.put("x/y", b"1")
        first.stop()
        make_cluster_of(second)
        assert store.put("x/y", b"2")
        assert open_store(url).get("x/y") == b"2"


def test_an_answer_that_comes_by_drops(caplog):
    """Each drop is within the timeout, and the answer is never whole. Who gives up closes the connection."""
    hung_up, until_s = threading.Event(), time.monotonic() + 60

    def drip(listener):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.recv(1 << 16)
                    peer.sendall(b"$1000000\r\n")
                    while time.monotonic() < until_s:
                        peer.sendall(b"x")
                        time.sleep(0.02)
                hung_up.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        store = open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}?timeout=0.3")
        with quicker_than(30):
            assert store.get("x/y") is None
        assert "Timeout" in store.degraded
        assert hung_up.wait(30)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_thread_that_an_interrupted_caller_took_and_never_called_ends(monkeypatch):
    monkeypatch.setattr(seeds, "_IDLE_S", 0.01)
    monkeypatch.setattr(seeds, "_TAKEN_S", 0.05)
    calls = queue.SimpleQueue()
    worker = threading.Thread(target=seeds._work, args=(calls, []), daemon=True)
    worker.start()
    time.sleep(0.03)
    answers = queue.SimpleQueue()
    for number in range(2):  # one that comes late is answered all the same
        calls.put((lambda number=number: number, answers.put))
        assert answers.get(timeout=20) == (number, None)
    worker.join(20)
    assert not worker.is_alive()
