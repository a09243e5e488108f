"""How long a call may wait for a server that says nothing: three timeouts, however many hosts the URL names and whatever is waited for.

Times are compared with what an unbounded call would take, many times as long, since the machine may be busy.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from redis_server import RedisServer

from moe_dist.stores.open import open_store


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
    with silent_hosts(5) as hosts, RedisServer("--cluster-enabled", "yes") as server, server.client() as node:
        node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        until = time.monotonic() + 60
        while node.execute_command("CLUSTER INFO")["cluster_state"] != "ok" and time.monotonic() < until:
            time.sleep(0.02)
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
