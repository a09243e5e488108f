"""The store on a server: what lies there, and the ways to reach one. All servers are real."""

from __future__ import annotations

import contextlib
import time

import pytest
import redis
from redis_server import RedisServer, TlsEnd, free_port
from redis_urls import AT_ONCE, ENCODED, SECRET, url_of, warnings_of

import moe_dist as md
from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisStore

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


# Each ends the connection of a client whose replies lie there unread: ten commands' at once, 12 MB, are too much for either.
@pytest.mark.parametrize("limit", [("client-output-buffer-limit", "normal 4mb 0 0"), ("maxmemory-clients", "8mb")])
def test_a_server_that_bounds_what_it_keeps_for_a_client_is_read_a_command_at_a_time(limit):
    keys = [f"entries/e1/k{number:05d}" for number in range(10_000)]
    with RedisServer() as server, server.client() as client:
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                folder, _, name = key.rpartition("/")
                pipeline.set(f"moe_dist:{{{folder}}}/{name}", b"x" * 1260)
            pipeline.execute()
        client.config_set(*limit)
        store = open_store(url_of(server, "timeout=20"))
        assert len(store.get_many(keys)) == 10_000
        assert store.degraded is None
        store.close()


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


@pytest.mark.parametrize(
    ("count", "commands", "trips"),
    [
        (2500, 3, 1),  # two full commands and a part
        (10_000, 10, 1),  # what a store is attached with at the most, by the bar
        (10_001, 11, 2),  # no trip brings more, however many are asked for
    ],
)
def test_a_bulk_read_is_one_pipeline(server, count, commands, trips):
    keys = [f"x/k{number}" for number in range(count)]
    with server.client() as client:
        client.mset({f"moe_dist:{{x}}/k{number}": number for number in range(count)})
        client.config_resetstat()
        store = RedisStore.from_url(url_of(server))
        made, call = [], store._call
        store._call = lambda command: (made.append(command), call(command))[1]
        assert store.get_many(keys) == {key: str(number).encode() for number, key in enumerate(keys)}
        sent = client.info("commandstats")
    assert (sent["cmdstat_mget"]["calls"], len(made)) == (commands, trips)
    assert {"cmdstat_multi", "cmdstat_exec"}.isdisjoint(sent), "no transaction, which would hold the server for all of it"


def test_a_pipeline_that_is_refused_says_why_in_a_line(server):
    """And not all the names that it asked for."""
    with server.client() as client:
        client.acl_setuser("blind", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-mget"])
    store = open_store(url_of(server).replace("redis://", "redis://blind:any@"))
    assert store.get_many([f"x/k{number}" for number in range(2500)]) == {}
    assert "mget" in store.degraded.lower()
    assert len(store.degraded) < 200


def test_a_listing_scans_one_environment_and_a_bulk_read_asks_a_thousand_keys_a_command(server):
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


def test_a_unix_socket_with_a_password_a_user_and_a_database(no_secret):
    with RedisServer(password=SECRET) as server:
        with server.client() as client:
            client.acl_setuser("moe", enabled=True, passwords=["+" + SECRET], keys=["moe_dist:*"], categories=["+@all"])
        for login in (f":{ENCODED}@", f"moe:{ENCODED}@"):
            store = open_store(f"unix://{login}{server.socket}?db=3&timeout=20")
            assert store.put("x/y", login.encode())
            assert open_store(url_of(server, login=f":{ENCODED}@", db=3)).get("x/y") == login.encode()
            assert open_store(url_of(server, login=f":{ENCODED}@")).get("x/y") is None
            assert SECRET not in repr(store) + store.url
        refused = open_store(f"unix://moe:wrong@{server.socket}?db=3&timeout=20")
        assert not refused.put("x/y", b"1")
        assert "AuthenticationError" in refused.degraded


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
        for kind, path in (("", ""), ("+sentinel", "/main"), ("+cluster", "")):
            plain = open_store(f"redis{kind}://localhost:{tls.port}{path}?timeout=20")
            assert plain.get("x/y") is None
            assert plain.degraded.endswith("; if it speaks TLS, write rediss://"), plain.degraded
        assert stranger.degraded.endswith("; name a file of the authority that signed its certificate by ca=FILE")
        assert other_name.degraded.endswith("; name the host as its certificate does")
        nowhere = open_store(f"rediss://localhost:{tls.port}?ca=/nosuch&timeout=20")
        assert not nowhere.put("x/y", b"1")
        assert nowhere.degraded.endswith("; ca, cert and key must name files of this host")


def test_a_server_without_tls_is_told_from_a_slow_one(server, monkeypatch):
    """It waits for the rest of a line, and who speaks TLS for its handshake: for all attempts, and it would not be known why."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    store = open_store(f"rediss://127.0.0.1:{server.port}?timeout=2")
    assert not store.put("x/y", b"1")
    said = "answers in plain text, not over TLS; write redis:// for a server without TLS, or give its TLS port"
    assert store.degraded == f"ConnectionError: 127.0.0.1:{server.port} {said}"
    assert pauses == [], "it is not tried again"


def test_a_server_that_refuses_is_told_with_the_way_out(server, no_secret):
    with RedisServer(password=SECRET) as closed:
        with closed.client() as client:
            client.acl_setuser("moe", enabled=True, passwords=["+" + SECRET], keys=["other:*"], categories=["+@all"])
        acl = "let its ACL allow ~mine:* +mget +set +del +scan"
        for url, way_out in {
            url_of(closed): "it asks for a login: redis://USER:PASSWORD@HOST, without USER for the default one",
            url_of(closed, login=":wrong@"): "correct user and password in the URL (%-encoded)",
            url_of(closed, "prefix=mine", login=f"moe:{ENCODED}@"): acl,
            url_of(server, login=f":{ENCODED}@"): "it asks for no login: leave it out of the URL",
            url_of(server, db=99): "name a database that it has: /0",
            f"redis+cluster://127.0.0.1:{server.port}?timeout=20": "write redis:// for a server alone",
            f"redis+sentinel://127.0.0.1:{server.port}/main?timeout=20": "it is no sentinel: write redis:// for a server",
        }.items():
            store = open_store(url)
            assert not store.put("x/y", b"1")
            assert store.degraded.endswith(f"; {way_out}"), store.degraded


def test_a_password_over_tls_with_a_certificate_of_our_own(no_secret):
    with RedisServer(password=SECRET) as server, TlsEnd(server, mutual=True) as tls:
        ours = f"ca={tls.ca}&cert={tls.ca}&key={tls.key}&timeout=20"
        store = open_store(f"rediss://:{ENCODED}@localhost:{tls.port}?{ours}")
        assert store.put("x/y", b"1")
        assert store.get("x/y") == b"1"
        without = open_store(f"rediss://:{ENCODED}@localhost:{tls.port}?ca={tls.ca}&timeout=1")
        wrong = open_store(f"rediss://:another@localhost:{tls.port}?{ours}")
        assert without.get("x/y") is wrong.get("x/y") is None
        assert without.degraded.endswith("; if it asks its clients for a certificate, name one by cert=FILE, key=FILE")
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


def test_sentinels_and_their_master_over_tls_with_a_user_of_the_sentinels_own(tmp_path, no_secret):
    """The sentinel names the master by the TLS end before it, so that it sees no master there itself: it may take long to say so."""
    with RedisServer(password=SECRET) as server, TlsEnd(server) as near:
        config = tmp_path / "sentinel.conf"
        config.write_text(
            "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
            f"sentinel monitor main localhost {near.port} 1\nsentinel down-after-milliseconds main 600000\n"
            f"user watch on >{SECRET} +@all\n"
        )
        with RedisServer(str(config), "--sentinel", mode="sentinel", password="other") as watcher, TlsEnd(watcher) as tls:
            for ca in (near.ca, tls.ca):
                (tmp_path / "ca.pem").open("ab").write(ca.read_bytes())
            where = f"localhost:{tls.port}/main?timeout=20&ca={tmp_path}/ca.pem"
            store = open_store(f"rediss+sentinel://:{ENCODED}@{where}&sentinel_user=watch&sentinel_password={ENCODED}")
            assert store.put("x/y", b"1"), store.degraded
            assert open_store(url_of(server, login=f":{ENCODED}@")).get("x/y") == b"1"
            refused = open_store(f"rediss+sentinel://:{ENCODED}@{where}&sentinel_user=stranger&sentinel_password={ENCODED}")
            assert not refused.put("x/y", b"2")
            assert "<redis" not in refused.degraded
            assert SECRET not in repr([store, refused]) + store.url + refused.degraded


def test_sentinels_that_do_not_answer_are_told_in_one_line_with_their_reason(caplog):
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(5))
    store = open_store(f"redis+sentinel://{hosts}/main?timeout=1")
    assert not store.put("x/y", b"1")
    assert store.degraded.startswith(
        "ConnectionError: no sentinel names a master for the service of the URL: Error 111 connecting to 127.0.0.1:"
    )
    assert store.degraded.endswith("and 2 more")
    assert len(store.degraded) < 400
    (warning,) = warnings_of(caplog)
    assert hosts in warning.getMessage()


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
            assert unknown.degraded.endswith(f"of the URL: 127.0.0.1:{watcher.port}: it does not watch that service")


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


def test_a_cluster_with_a_password(no_secret):
    with RedisServer("--cluster-enabled", "yes", password=SECRET) as node:
        with node.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            until = time.monotonic() + 60
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok" and time.monotonic() < until:
                time.sleep(0.05)
        store = open_store(f"redis+cluster://:{ENCODED}@127.0.0.1:{node.port}?timeout=20")
        assert store.put("x/y", b"1"), store.degraded
        assert store.list("") == ["x/y"]
        refused = open_store(f"redis+cluster://:{ENCODED}wrong@127.0.0.1:{node.port}?timeout=20")
        assert not refused.put("x/y", b"2")
        assert store.get("x/y") == b"1"
        assert SECRET not in repr([store, refused]) + refused.degraded
        store.close()


def allow(nodes, user, *rules):
    for node in nodes:
        with node.client() as client:
            client.execute_command("ACL SETUSER", user, "reset", "on", ">" + SECRET, *rules)


def refusals(url):
    """What a new store says of each call's refusal."""
    said = {}
    calls = {"mget": ("get", "x/y"), "set": ("put", "x/y", b"1"), "scan": ("list", "x"), "del": ("delete", "x/y")}
    with contextlib.closing(RedisStore.from_url(url, retry_after=AT_ONCE)) as store:
        for command, (call, *given) in calls.items():
            getattr(store, call)(*given)
            said[command] = store.degraded
    return said


@pytest.mark.parametrize(
    ("kind", "db", "more"),
    [
        ("", "/0", []),
        ("", "/3", ["select"]),  # which database 0 needs not
        ("+cluster", "", ["cluster|slots", "command"]),  # and asking, while a slot moves: test_failover
    ],
    ids=["plain", "database 3", "cluster"],
)
def test_the_rights_that_are_told_are_enough_and_each_of_them_is_needed(kind, db, more, server, cluster, no_secret):
    """Of a user that has none yet, as the message has them."""
    nodes = cluster[0] if kind else [server]
    url = f"redis{kind}://moe:{ENCODED}@127.0.0.1:{nodes[0].port}{db}?prefix=mine&timeout=20"
    allow(nodes, "moe")
    (told,) = {said.rpartition("; let its ACL allow ")[2] for said in refusals(url).values()}
    rules = told.split()
    allow(nodes, "moe", *rules)
    assert set(refusals(url).values()) == {None}
    assert set(rules) - {"+asking"} == {"~mine:*", "+mget", "+set", "+del", "+scan", *(f"+{name}" for name in more)}
    for name in ["mget", "set", "scan", "del", *more]:
        allow(nodes, "moe", *(rule for rule in rules if rule != f"+{name}"))
        said = refusals(url).get(name) or refusals(url)["set"]
        assert f"'{name}' command; let its ACL allow {told}" in said, said


def test_what_an_acl_refuses_unforeseen_is_told_with_the_rest():
    """As a release of redis-py may send something else."""

    def connect():
        raise redis.exceptions.NoPermissionError(
            "this user has no permissions to run the 'info' command or its subcommand"
        )  # Redis 6's words

    store = RedisStore(connect, url="redis://fake")
    assert not store.put("x/y", b"1")
    assert store.degraded.endswith("; let its ACL allow ~moe_dist:* +mget +set +del +scan +info")


def test_a_sentinel_that_refuses_is_told_from_its_master(tmp_path, server, no_secret):
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {server.port} 1\n")
    with RedisServer(str(config), "--sentinel", mode="sentinel") as watcher:
        where = f"127.0.0.1:{watcher.port}/main?timeout=20&prefix=mine"
        url = f"redis+sentinel://moe:{ENCODED}@{where}&sentinel_user=watch&sentinel_password={ENCODED}"
        allow([watcher], "watch")
        allow([server], "moe", "~mine:*", "+mget", "+set", "+del")
        (told,) = {said.rpartition("; let the ACL of the sentinels allow ")[2] for said in refusals(url).values()}
        allow([watcher], "watch", told)
        said = refusals(url)
        assert said.pop("scan").endswith("; let its ACL allow ~mine:* +mget +set +del +scan")
        assert set(said.values()) == {None}


def test_a_cluster_that_is_gone(caplog):
    store = RedisStore.from_url(f"redis+cluster://127.0.0.1:{free_port()}?timeout=0.1")
    assert not store.put("x/y", b"1")
    assert store.list("x") == ["x/y"]
    assert len(warnings_of(caplog)) == 1
