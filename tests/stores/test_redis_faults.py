"""What a server can do to the store. All servers are real but those that no real one can be."""

from __future__ import annotations

import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import redis
from fake_server import fake_server
from redis_server import RedisServer, free_port
from redis_urls import AT_ONCE, ENCODED, SECRET, url_of, warnings_of

import moe_dist as md
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.stores import redis as redis_store
from moe_dist.stores import seeds
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


def test_a_server_is_suspected_of_speaking_the_other_way_once_a_trip_and_until_it_has_answered(monkeypatch):
    """One that has answered speaks as the URL says, and what befell it since is something else."""
    asked, answers = [], []

    def nobody(*where):
        asked.append(where)
        raise OSError("no answer in plain text")

    class Client:
        def mget(self, names):
            if isinstance(answers[0], Exception):
                raise answers[0]
            return answers.pop(0)

    monkeypatch.setattr(seeds, "plain_host", nobody)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    over_tls = RedisStore(Client, url="rediss://fake", tls=[("fake", 1)], retry_after=AT_ONCE)
    plainly = RedisStore(Client, url="redis://fake", retry_after=AT_ONCE)
    said = []
    for _ in range(2):
        answers[:] = [redis.TimeoutError("Timeout connecting to server")]
        assert over_tls.get("x/y") is None
        assert len(asked) == 1
        answers[:] = [redis.ConnectionError("Connection closed by server.")]
        assert plainly.get("x/y") is None
        said.append(plainly.degraded)
        answers[:] = [[b"1"], [b"1"]]
        assert over_tls.get("x/y") == plainly.get("x/y") == b"1"
    assert said == [
        "ConnectionError: Connection closed by server; if it speaks TLS, write rediss://",
        "ConnectionError: Connection closed by server",
    ]


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
            assert store.degraded.startswith("OutOfMemory")
            assert store.degraded.endswith("; raise its maxmemory, or let it evict (maxmemory-policy)")
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
        assert store.degraded.startswith("ReadOnly")
        assert store.degraded.endswith("; name the master, or its sentinels by redis+sentinel://")
        store.delete("x/y")
        assert store.list("x") == ["x/z"]
        assert open_store(url_of(master)).list("x") == ["x/y"]
        assert len(warnings_of(caplog)) == 1


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
    with fake_server(lambda words: reply) as port:
        store = open_store(f"redis://:{ENCODED}@127.0.0.1:{port}?timeout=0.1")
        assert store.get("x/y") is None
        assert not store.put("x/y", b"1")
        assert store.list("x") == ["x/y"]
        assert SECRET not in repr(store) + store.degraded
        assert len(warnings_of(caplog)) == 1


KEYS = [(b"mget", -1), (b"set", 1), (b"del", -1)]  # of each command, which of its words is the last key


def honest(words, port):
    """What an empty server says that knows no later command than these, all of a cluster at `port`, or a sentinel of a master there."""
    return {
        b"AUTH": b"+OK\r\n",
        b"SELECT": b"+OK\r\n",
        b"CLUSTER": b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$1\r\n1\r\n" % port,
        b"SENTINEL": b"*1\r\n*10\r\n+name\r\n+main\r\n+ip\r\n+127.0.0.1\r\n+port\r\n+%d\r\n"
        b"+flags\r\n+master\r\n+num-other-sentinels\r\n+0\r\n" % port,
        b"MGET": b"*%d\r\n" % len(words[1:]) + b"$-1\r\n" * len(words[1:]),
        b"SET": b"+OK\r\n",
        b"SCAN": b"*2\r\n+0\r\n*0\r\n",
        b"DEL": b":0\r\n",
        b"COMMAND": b"*3\r\n" + b"".join(b"*6\r\n+%s\r\n:-2\r\n*0\r\n:1\r\n:%d\r\n:1\r\n" % keys for keys in KEYS),
    }.get(words[0], b"-ERR unknown command '%s'\r\n" % words[0])


NUMBER, NOTHING, BYTES = b":1\r\n", b"$-1\r\n", b"$2\r\nab\r\n"
NOT_TWO_VALUES = [NUMBER, NOTHING, BYTES, b"*1\r\n+a\r\n", b"*3\r\n+a\r\n+b\r\n+c\r\n", b"*2\r\n:1\r\n:2\r\n", b"*2\r\n*0\r\n*0\r\n"]
NO_LISTING = [
    NUMBER,
    NOTHING,
    BYTES,
    b"*1\r\n+0\r\n",
    b"*2\r\n+x\r\n*0\r\n",
    b"*2\r\n+0\r\n" + BYTES,
    b"*2\r\n+0\r\n*1\r\n:1\r\n",
]


def check_no_answer(url, command, reply, call):
    """What `call` returns of a store at a server that answers `reply` to this command, and to all others what it should."""
    asked = []

    def answer(words):
        asked.append(words[0])
        return reply if words[0] == command else honest(words, port)

    with fake_server(answer) as port:
        store = RedisStore.from_url(url.format(port=port))
        returned = call(store)
        assert "no answer of a Redis server (" in store.degraded, (reply, store.degraded)
        assert command in asked
        store.close()
    return returned


# Of each command that a store sends, alone and to a cluster, answers of which none is what the command answers, if only nearly.
@pytest.mark.parametrize("kind", ["", "+cluster"], ids=["plain", "cluster"])
@pytest.mark.parametrize(
    ("command", "call", "nothing", "replies"),
    [
        (b"MGET", lambda store: store.get_many(["x/y", "x/z"]), {}, NOT_TWO_VALUES),
        (b"MGET", lambda store: store.get_many([f"x/k{number}" for number in range(1002)]), {}, NOT_TWO_VALUES),  # two commands
        (b"SET", lambda store: store.put("x/y", b"1"), False, [NUMBER, NOTHING, BYTES, b"+QUEUED\r\n", b"*1\r\n+OK\r\n"]),
        (b"SCAN", lambda store: store.list("x"), [], NO_LISTING),
        (b"DEL", lambda store: store.delete("x/y"), None, [NOTHING, BYTES, b"+QUEUED\r\n", b"*1\r\n:1\r\n"]),
    ],
    ids=["MGET", "MGETs", "SET", "SCAN", "DEL"],
)
def test_an_answer_of_a_wrong_kind_reaches_no_caller(kind, command, call, nothing, replies, monkeypatch):
    monkeypatch.setattr(redis_store, "_ATTEMPTS", 1)
    for reply in replies:
        assert check_no_answer(f"redis{kind}://127.0.0.1:{{port}}?timeout=20", command, reply, call) == nothing, reply


@pytest.mark.parametrize(
    ("url", "command", "reply"),
    [
        ("redis+sentinel://127.0.0.1:{port}/main", b"SENTINEL", NUMBER),
        ("redis+sentinel://127.0.0.1:{port}/main", b"SENTINEL", b"*1\r\n*2\r\n$4\r\nname\r\n$4\r\nmain\r\n"),  # without an address
        ("redis+cluster://127.0.0.1:{port}", b"CLUSTER", NUMBER),
        ("redis+cluster://127.0.0.1:{port}", b"CLUSTER", b"*1\r\n*0\r\n"),  # slots of nobody
    ],
)
def test_a_greeting_of_a_wrong_kind_reaches_no_caller(url, command, reply):
    assert check_no_answer(f"{url}?timeout=20", command, reply, lambda store: store.put("x/y", b"1")) is False


@pytest.mark.parametrize("url", ["redis://{at}", "redis://u:any@{at}/3", "redis+sentinel://{at}/main/3", "redis+cluster://u:any@{at}"])
def test_a_server_or_proxy_that_knows_no_hello_is_used_as_any_other(url):
    """Else the tests above would end at another answer than the one that they are about, too."""
    with fake_server(lambda words: honest(words, port)) as port:
        store = RedisStore.from_url(url.format(at=f"127.0.0.1:{port}") + "?timeout=20")
        assert store.put("x/y", b"1"), store.degraded
        assert store.get_many(["x/y", "x/z"]) == {}
        assert store.list("x") == []
        store.delete("x/y")
        assert store.degraded is None
        store.close()


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
