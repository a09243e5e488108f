"""The store on a server: how it is addressed, and what a server can do to it. All servers are real but two that no real one can be."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import threading
import time
import traceback
import urllib.parse
from datetime import timedelta

import pytest
import redis
from redis_server import RedisServer, TlsEnd, free_port

import moe_dist as md
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.errors import StoreError
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisAddress, RedisStore
from moe_dist.tuning.tuner import Tuner

SECRET = "s3cret/+@!"
ENCODED = "s3cret%2F%2B%40%21"
AT_ONCE = timedelta(0)


def url_of(server, query="timeout=20", login="", db=0):
    return f"redis://{login}127.0.0.1:{server.port}/{db}?{query}"


def warnings_of(caplog):
    return [record for record in caplog.records if record.name == "moe_dist.stores" and record.levelno >= logging.WARNING]


@pytest.fixture
def no_secret(caplog, capfd):
    """Everything that is logged or printed, by anybody, at any level; none of it may hold the password."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        assert SECRET not in text
        assert ENCODED not in text


# --- addresses


@pytest.mark.parametrize(
    ("url", "public", "fields"),
    [
        ("redis://host", "redis://host:6379/0", {"hosts": (("host", 6379),)}),
        ("redis://[::1]:7000/3", "redis://[::1]:7000/3", {"hosts": (("::1", 7000),), "db": 3}),
        ("redis://host?db=2&prefix=p&ttl=60&timeout=0.5", "redis://host:6379/2", {"db": 2, "prefix": "p", "ttl": timedelta(minutes=1), "timeout": timedelta(milliseconds=500)}),
        (f"rediss://user:{ENCODED}@host:1/0?ca=/ca.pem&verify=no", "rediss://host:1/0", {"tls": True, "user": "user", "password": SECRET, "ca": "/ca.pem", "verify": False}),
        (f"redis://:{SECRET}@host", "redis://host:6379/0", {"user": None, "password": SECRET}),  # written without %, but for its '/' and '@' it can be told
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1", {"path": "/run/redis.sock", "db": 1}),
        ("redis+sentinel://a,b:1/main/2", "redis+sentinel://a:26379,b:1/main/2", {"kind": "sentinel", "service": "main", "db": 2}),
        ("rediss+sentinel://a/main?sentinel_password=x", "rediss+sentinel://a:26379/main/0", {"sentinel_password": "x", "tls": True}),
        ("redis+cluster://a:1,b:2", "redis+cluster://a:1,b:2", {"kind": "cluster", "hosts": (("a", 1), ("b", 2))}),
    ],
)  # fmt: skip
def test_an_address_is_what_the_url_says(url, public, fields):
    address = RedisAddress.parse(url)
    assert {name: getattr(address, name) for name in fields} == fields
    assert address.public == public
    assert SECRET not in repr(address)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"redis://u:{ENCODED}@host:port/0", "store URL redis://host:port/0: port, db, ttl or timeout is no number"),
        (f"redis://user:{ENCODED}", "store URL redis://user: port, db, ttl or timeout is no number"),
        (f"redis://u:{ENCODED}@host:99999", "port, db, ttl"),
        (f"redis://u:{ENCODED}@", "port, db, ttl"),
        (f"redis://u:{ENCODED}@host/zero", "port, db, ttl"),
        (f"redis://u:{ENCODED}@host?ttl=soon", "port, db, ttl"),
        (f"redis://u:{ENCODED}@host?verify=maybe", "verify is neither yes nor no"),
        (f"redis://u:{ENCODED}@host?ttl=0.5", "ttl is below a second"),
        (f"redis://u:{ENCODED}@host?timeout=1e9", "timeout is outside 0.01 to 60 seconds"),
        (f"redis://u:{ENCODED}@host?timeout=nan", "port, db, ttl"),
        (f"redis://u:{ENCODED}@host?prefix=a{{b", "prefix 'a{b'; use 1 to 64 letters"),
        (f"redis://u:{ENCODED}@host?pasword=x&ttl=9", "unknown parameter pasword; known are prefix, ttl"),
        (f"redis://u:?{SECRET}@host", "must be written %3F"),
        (f"redis+sentinel://u:{ENCODED}@host", "name the service"),
        (f"redis+cluster://u:{ENCODED}@host/1", "a cluster has no databases"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url, message):
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert message in str(caught.value)
    for secret in (SECRET, ENCODED):
        assert secret not in str(caught.value)
        assert secret not in repr(caught.value)


def test_the_rest_of_a_password_without_a_host_is_no_parameter_that_an_error_names():
    with pytest.raises(StoreError, match="unknown parameter whose name is none; known are") as caught:
        open_store("redis://u:a?S3cret?timeout=1")
    assert "S3cret" not in str(caught.value)


def test_an_unknown_scheme_lists_the_schemes_without_the_password():
    with pytest.raises(StoreError, match=r"scheme 'reddis:' is unknown; use one of memory:, .*redis\+cluster://") as caught:
        open_store(f"reddis://u:{ENCODED}@host")
    assert ENCODED not in str(caught.value)


# Every way in which a secret can stand in a URL, right or wrong. "mark" is in each piece of it that a split may leave.
PIECES = "mark/mark+mark@mark!mark,mark#mark"
WRITTEN = {
    "encoded": urllib.parse.quote(PIECES, safe=""),
    "lower case": re.sub("%..", lambda code: code[0].lower(), urllib.parse.quote(PIECES, safe="")),
    "plus for blanks": urllib.parse.quote_plus(PIECES.replace("!", " ")),
    "as it is": PIECES,
}
PLACES = (
    "redis://user:{s}@127.0.0.1:1/0?timeout=0.05",
    "redis://:{s}@127.0.0.1:1?timeout=0.05&prefix=p",
    "rediss://user:{s}@127.0.0.1:1/0?timeout=0.05",
    "unix://user:{s}@/nowhere/socket?timeout=0.05",
    "unix://:{s}@/nowhere/socket?timeout=0.05&db=2",
    "redis+sentinel://user:{s}@127.0.0.1:1/main/0?timeout=0.05",
    "rediss+sentinel://:{s}@127.0.0.1:1,127.0.0.1:2/main?timeout=0.05&sentinel_user=u&sentinel_password={s}",
    "redis+sentinel://127.0.0.1:1/main?timeout=0.05&sentinel_password={s}",
    "redis+cluster://user:{s}@127.0.0.1:1?timeout=0.05",
    "rediss+cluster://:{s}@127.0.0.1:1,127.0.0.1:2?timeout=0.05",
    "layered:LOCAL,redis://user:{s}@127.0.0.1:1/0?timeout=0.05",
    "layered:redis://user:{s}@127.0.0.1:1/0?timeout=0.05,redis://user:{s}@127.0.0.1:2/0?timeout=0.05",
    "read-only:redis://user:{s}@127.0.0.1:1/0?timeout=0.05",
    # wrong ones
    "redis://127.0.0.1:1?password={s}",
    "redis://127.0.0.1:1?timeout=0.05&{s}",
    "redis://user:{s}@127.0.0.1:port",
    "redis://user:{s}@127.0.0.1:1/zero",
    "redis://user:{s}@127.0.0.1:1?ttl={s}",
    "redis://user:{s}@127.0.0.1:1?sentinel_passwort={s}",
    "redis://user:{s}",
    "redis://user:?{s}@127.0.0.1",
    "redis+sentinel://user:{s}@127.0.0.1",
    "redis+cluster://user:{s}@127.0.0.1/1",
    "redis:/user:{s}@127.0.0.1",
    "REDIS://user:{s}@127.0.0.1",
    "reddis://user:{s}@127.0.0.1",
    "http://user:{s}@127.0.0.1",
    "file://user:{s}@127.0.0.1/path",
)


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("place", PLACES)
def test_no_secret_of_any_url_is_ever_said(place, written, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    url = place.replace("{s}", WRITTEN[written]).replace("LOCAL", str(tmp_path))
    said = []
    try:
        store = open_store(url)
    except StoreError as error:
        said += [str(error), repr(error), "".join(traceback.format_exception(error))]
    else:
        with contextlib.closing(store):
            store.get("x/y")
            assert not store.put("x/y", b"1")
            said += [repr(store), str(store), store.url, str(store.degraded)]
            assert "127.0.0.1:1" in store.url or "/nowhere/socket" in store.url or "layered" in store.url
    assert said
    printed = capfd.readouterr()
    # The traceback of an error may show the line of this test, but not what stood in it.
    for text in (*said, caplog.text, printed.out, printed.err):
        assert "mark" not in text.replace("pytest.mark", "")


def test_without_redis_py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(StoreError, match=r"redis://host:6379/0 needs redis-py; install moe-dist\[redis\]"):
        open_store("redis://host")


# --- what lies on the server


def test_a_key_carries_its_folder_as_hash_tag_and_its_value_is_the_bytes_alone(server):
    store = open_store(url_of(server, "prefix=job-1&timeout=20"))
    for key in ("entries/e1/k1", "entries/e1/k2", "entries/e2/k1", "top"):
        assert store.put(key, b"\x81\xa1v")
    with server.client() as client:
        names = sorted(client.scan_iter())
        assert names == [b"job-1:{entries/e1}/k1", b"job-1:{entries/e1}/k2", b"job-1:{entries/e2}/k1", b"job-1:{}/top"]
        assert client.get(names[0]) == b"\x81\xa1v"
        assert client.ttl(names[0]) == -1


def test_prefix_and_database_keep_stores_apart(server):
    one, two, other = (open_store(url_of(server, f"prefix={prefix}&timeout=20", db=db)) for prefix, db in (("a", 0), ("b", 0), ("a", 3)))
    assert one.put("x/y", b"1")
    for store in (two, other):
        assert store.get("x/y") is None
        assert store.list("") == []
    assert one.list("x") == ["x/y"]


def test_a_ttl_is_set_and_renewed_by_the_next_put(server):
    store = open_store(url_of(server, "ttl=1000&timeout=20"))
    assert store.put("x/y", b"1")
    with server.client() as client:
        client.pexpire("moe_dist:{x}/y", 5)
        assert store.put("x/y", b"2")
        assert 900_000 < client.pttl("moe_dist:{x}/y") <= 1_000_000


def test_strangers_keys_are_no_entries(server):
    store = open_store(url_of(server))
    store.put("x/y", b"1")
    with server.client() as client:
        client.mset(
            {"other": 1, "moe_dist:{x}/UPPER": 1, "moe_dist:{x}": 1, "moe_dist:{x}/../y": 1, "moe_dist2:{x}/z": 1, b"moe_dist:{x}/\xff": 1}
        )
        client.rpush("moe_dist:{x}/queue", 1)  # a key of ours by its name, but a list
    assert store.list("") == ["x/queue", "x/y"]
    assert store.get_many(["x/queue", "x/y"]) == {"x/y": b"1"}
    assert store.put("x/queue", b"2")
    assert store.get("x/queue") == b"2"
    assert store.degraded is None


def test_more_keys_than_one_trip_takes(server):
    store = open_store(url_of(server))
    keys = [f"x/k{number}" for number in range(2500)]  # two full trips and a part
    with server.client() as client:
        client.mset({f"moe_dist:{{x}}/k{number}": number for number in range(2500)})
    assert store.list("x") == sorted(keys)
    assert store.get_many(keys) == {key: str(number).encode() for number, key in enumerate(keys)}


def test_a_listing_scans_one_environment_and_a_bulk_read_is_one_trip_a_thousand_keys(server):
    with server.client() as client:
        client.mset({f"moe_dist:{{entries/e{number % 2}}}/k{number}": number for number in range(3000)})
        client.config_resetstat()
        store = open_store(url_of(server))
        found = store.get_many(store.list("entries/e1"))
        sent = client.info("commandstats")
    assert found == {f"entries/e1/k{number}": str(number).encode() for number in range(1, 3000, 2)}
    assert sent["cmdstat_mget"]["calls"] == 2
    assert 1 <= sent["cmdstat_scan"]["calls"] <= 10
    assert {"cmdstat_keys", "cmdstat_get"}.isdisjoint(sent)


def test_values_are_the_same_bytes_as_on_disk(server, tmp_path):
    local = FilesystemStore(tmp_path)
    with md.autotune(store=f"layered:{tmp_path},{url_of(server)}", ladder=md.BucketLadder((1, 4)), device="cpu") as tuner:
        tuner.record(SimulatedOperation("layer", {"plain": 2000.0, "quick": 500.0}))
    tuner.close()
    shared = open_store(url_of(server))
    keys = shared.list("")
    assert len(keys) == 3  # two entries and an epoch
    assert keys == local.list("")
    assert shared.get_many(keys) == local.get_many(keys)


# --- ways to reach one


def test_a_unix_socket(server):
    store = open_store(f"unix://{server.socket}?timeout=20")
    assert store.put("x/y", b"1")
    assert open_store(url_of(server)).get("x/y") == b"1"


def test_a_password_and_a_user_of_an_access_list(no_secret):
    with RedisServer(password=SECRET) as server:
        store = open_store(url_of(server, login=f":{ENCODED}@"))
        assert store.put("x/y", b"1")
        with server.client() as client:
            client.acl_setuser("moe", enabled=True, passwords=["+" + SECRET], keys=["moe_dist:*"], categories=["+@all"])
        user = open_store(url_of(server, login=f"moe:{ENCODED}@"))
        assert user.get("x/y") == b"1"
        outside = open_store(url_of(server, "prefix=elsewhere&timeout=20", login=f"moe:{ENCODED}@"))
        assert not outside.put("x/y", b"1")
        assert "NoPermission" in outside.degraded
        assert SECRET not in repr([store, user, outside]) + store.url


def test_a_wrong_password_degrades_with_one_warning_and_without_retries(caplog, no_secret):
    with RedisServer(password="right") as server:
        store = open_store(url_of(server, login=f"u:{ENCODED}@"))
        assert not store.put("x/y", b"1")
        assert store.get("x/y") == b"1"
        (warning,) = warnings_of(caplog)
        assert f"store redis://127.0.0.1:{server.port}/0: AuthenticationError" in warning.getMessage()


def test_tls_is_verified(server, no_secret):
    with TlsEnd(server) as tls:
        trusted = open_store(f"rediss://localhost:{tls.port}?ca={tls.ca}&timeout=20")
        assert trusted.put("x/y", b"1")
        assert trusted.get("x/y") == b"1"
        unverified = open_store(f"rediss://localhost:{tls.port}?verify=no&timeout=20")
        assert unverified.get("x/y") == b"1"
        other_name = open_store(f"rediss://127.0.0.1:{tls.port}?ca={tls.ca}&timeout=20")  # trusted, and of another host
        assert other_name.get("x/y") is None
        assert "certificate verify failed: IP address mismatch" in other_name.degraded
        stranger = open_store(f"rediss://localhost:{tls.port}?timeout=20")
        assert stranger.get("x/y") is None
        assert "certificate" in stranger.degraded.lower()
        plain = open_store(f"redis://localhost:{tls.port}?timeout=0.2")
        assert plain.get("x/y") is None
        assert plain.degraded is not None


def test_a_password_over_tls_with_a_certificate_of_our_own(no_secret):
    with RedisServer(password=SECRET) as server, TlsEnd(server, mutual=True) as tls:
        ours = f"ca={tls.ca}&cert={tls.ca}&key={tls.key}&timeout=20"
        store = open_store(f"rediss://:{ENCODED}@localhost:{tls.port}?{ours}")
        assert store.put("x/y", b"1")
        assert store.get("x/y") == b"1"
        without = open_store(f"rediss://:{ENCODED}@localhost:{tls.port}?ca={tls.ca}&timeout=1")
        wrong = open_store(f"rediss://:another@localhost:{tls.port}?{ours}")
        assert without.get("x/y") is wrong.get("x/y") is None
        assert without.degraded
        assert "AuthenticationError" in wrong.degraded
        assert SECRET not in repr([store, without, wrong]) + store.url + without.degraded + wrong.degraded


def test_sentinels_and_their_master_each_have_a_password(tmp_path, no_secret):
    with RedisServer(password=SECRET) as server:
        config = tmp_path / "sentinel.conf"
        config.write_text(f'sentinel monitor main 127.0.0.1 {server.port} 1\nsentinel auth-pass main "{SECRET}"\n')
        with RedisServer(str(config), "--sentinel", mode="sentinel", password="watch" + SECRET) as watcher:
            where = f"127.0.0.1:{watcher.port}/main?timeout=20"
            store = open_store(f"redis+sentinel://:{ENCODED}@{where}&sentinel_password=watch{ENCODED}")
            assert store.put("x/y", b"1")
            refused = open_store(f"redis+sentinel://:{ENCODED}@{where}&sentinel_password={ENCODED}")
            assert not refused.put("x/y", b"2")
            assert SECRET not in repr([store, refused]) + store.url + refused.degraded
            assert open_store(url_of(server, login=f":{ENCODED}@")).get("x/y") == b"1"


def test_sentinel_finds_the_master(tmp_path):
    with RedisServer() as server:
        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor main 127.0.0.1 {server.port} 1\n")
        with RedisServer(str(config), "--sentinel", mode="sentinel") as watcher:
            store = open_store(f"redis+sentinel://127.0.0.1:{watcher.port}/main/1?timeout=20")
            assert store.put("x/y", b"1")
            assert open_store(url_of(server, db=1)).get("x/y") == b"1"
            unknown = open_store(f"redis+sentinel://127.0.0.1:{watcher.port}/other?timeout=20")
            assert not unknown.put("x/y", b"1")
            assert "other" in unknown.degraded


@pytest.fixture(scope="module")
def cluster():
    """Two masters, the slots split between them; a seed that does not answer stands first in the URL."""
    with RedisServer("--cluster-enabled", "yes") as one, RedisServer("--cluster-enabled", "yes") as two:
        with one.client() as first, two.client() as second:
            first.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
            second.execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
            first.execute_command("CLUSTER MEET", "127.0.0.1", two.port)
            until = time.monotonic() + 60
            while not (_joined(first) and _joined(second)) and time.monotonic() < until:
                time.sleep(0.05)
        yield [one, two], f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{two.port}?timeout=20"


def _joined(client):
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "2"


def test_a_cluster(cluster):
    servers, url = cluster
    store = open_store(url)
    values = {f"{folder}/k{number}": f"{folder}{number}".encode() for folder in ("a", "b", "c", "entries/e1") for number in range(5)}
    for key, value in values.items():
        assert store.put(key, value)
    assert store.degraded is None
    assert store.get_many(values) == values
    assert store.list("") == sorted(values)
    assert store.list("entries") == [f"entries/e1/k{number}" for number in range(5)]
    store.delete("a/k0")
    assert store.get("a/k0") is None
    held = []
    for server in servers:
        with server.client() as client:
            held.append({name.split(b"}")[0] for name in client.scan_iter()})
    assert held[0]
    assert held[1]
    assert not held[0] & held[1]  # a folder lies on one node
    store.close()


def test_a_cluster_that_is_gone(caplog):
    store = RedisStore.from_url(f"redis+cluster://127.0.0.1:{free_port()}?timeout=0.1")
    assert not store.put("x/y", b"1")
    assert store.list("x") == ["x/y"]
    assert len(warnings_of(caplog)) == 1


# --- what a server can do


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


def test_a_failed_call_is_tried_three_times_with_growing_pauses(monkeypatch):
    pauses, failures = [], [redis.ConnectionError("reset"), redis.TimeoutError("late"), OSError("no route")]

    class Client:
        def mget(self, names):
            raise failures.pop(0) if failures else AssertionError("tried a fourth time")

    monkeypatch.setattr(time, "sleep", pauses.append)
    store = RedisStore(Client, url="redis://fake")
    assert store.get("x/y") is None
    assert (failures, pauses) == ([], [0.05, 0.1, 0.2])
    assert "OSError: no route" in store.degraded


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
            assert [str(winner.tactic["name"]) for winner in tuner.epoch.winners.values()] == ["quick"]
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
        assert store.get("x/z") == b"2"  # this process still knows it
        assert RedisStore.from_url(url_of(server)).list("x") == ["x/y"]
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
