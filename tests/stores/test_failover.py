"""Servers that take over from another: a sentinel that promotes a replica, a cluster whose slots move. All of them are real."""

from __future__ import annotations

import contextlib
import time

import pytest
import redis.crc
from redis_server import RedisServer, TlsEnd
from redis_urls import AT_ONCE, ENCODED, SECRET

from moe_dist.stores.open import open_store
from moe_dist.stores.redis import RedisStore
from moe_dist.stores.redis_url import RedisAddress

REPLICATES = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


def wait_for(condition, what):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def linked(replica):
    return replica.info("replication").get("master_link_status") == "up"


@pytest.mark.timeout(180)
def test_a_sentinel_promotes_a_replica_and_the_store_goes_on(tmp_path):
    """It is one, since two must first elect who promotes."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(RedisServer(*REPLICATES))
        replica = stack.enter_context(RedisServer("--replicaof", "127.0.0.1", str(master.port), *REPLICATES))
        first, second = stack.enter_context(master.client()), stack.enter_context(replica.client())
        wait_for(lambda: first.info("replication")["connected_slaves"] == 1 and linked(second), "no replica")
        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor main 127.0.0.1 {master.port} 1\nsentinel down-after-milliseconds main 300\n")
        sentinel = stack.enter_context(RedisServer(str(config), "--sentinel", mode="sentinel"))
        watching = stack.enter_context(sentinel.client())
        # Its own clocks, whose usual ticks are seconds; one that was kept from running does not trust them for a while.
        watching.execute_command("SENTINEL DEBUG", "info-period", 200, "tilt-period", 500)
        wait_for(lambda: watching.sentinel_masters()["main"]["num-slaves"] == 1, "the sentinel knows no replica")

        store = RedisStore.from_url(f"redis+sentinel://127.0.0.1:{sentinel.port}/main?timeout=10", retry_after=AT_ONCE)
        assert store.put("x/before", b"1")
        wait_for(lambda: second.get("moe_dist:{x}/before") == b"1", "the replica has not got it")
        master.stop()
        wait_for(lambda: store.put("x/after", b"2"), "nobody was promoted")
        assert store.get_many(["x/before", "x/after"]) == {"x/before": b"1", "x/after": b"2"}
        assert second.info("replication")["role"] == "master"
        assert second.get("moe_dist:{x}/after") == b"2"
        store.close()


@contextlib.contextmanager
def cluster_of(*, tls=False):
    """Two masters, the slots split between them, and a replica of the first; with TLS ends before them, the masters alone. Nobody takes
    over by itself: a machine that is busy makes no node lost."""
    with contextlib.ExitStack() as stack:
        servers = [RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "60000", *REPLICATES) for _ in range(2 if tls else 3)]
        ends = [stack.enter_context(TlsEnd(server, name="IP:127.0.0.1")) for server in servers] if tls else []
        for server, end in zip(servers, ends, strict=False):
            server.options += ("--cluster-announce-port", str(end.port))
        nodes = [stack.enter_context(stack.enter_context(server).client()) for server in servers]
        for node, (low, high) in zip(nodes, ((0, 8191), (8192, 16383)), strict=False):
            node.execute_command("CLUSTER ADDSLOTSRANGE", low, high)
        for server in servers[1:]:
            nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, server.port + 10000)
        wait_for(lambda: all(joined(node, len(nodes)) for node in nodes), "the nodes do not meet")
        if not tls:
            nodes[2].execute_command("CLUSTER REPLICATE", id_of(nodes[0]))
            wait_for(lambda: linked(nodes[2]), "no replica")
        yield servers, nodes, ends


def joined(node, count):
    info = node.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(count)


def id_of(node):
    return node.execute_command("CLUSTER MYID").decode()


def name_of(folder):
    return f"moe_dist:{{{folder}}}/k"


def slot_of(folder):
    return redis.crc.key_slot(name_of(folder).encode())


@pytest.mark.timeout(180)
def test_a_slot_of_a_cluster_moves_and_a_node_goes_down():
    with cluster_of() as (servers, (first, second, replica), _):
        seeds = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        url = f"redis+cluster://moe:{ENCODED}@{seeds}?timeout=10"
        for node in (first, second, replica):
            allowed = [f"+{command}" for command in RedisAddress.parse(url).needs]
            node.execute_command("ACL SETUSER", "moe", "on", ">" + SECRET, "~moe_dist:*", *allowed)
        store = RedisStore.from_url(url, retry_after=AT_ONCE)
        low = next(folder for folder in "abcdef" if slot_of(folder) < 8192)
        high = next(folder for folder in "abcdef" if slot_of(folder) >= 8192)
        assert store.put(f"{low}/k", b"1")
        assert store.put(f"{high}/k", b"2")
        assert store.put(f"{high}/stays", b"2")

        # A slot moves from the second to the first, as redis-cli moves it.
        first.execute_command("CLUSTER SETSLOT", slot_of(high), "IMPORTING", id_of(second))
        second.execute_command("CLUSTER SETSLOT", slot_of(high), "MIGRATING", id_of(first))
        second.migrate("127.0.0.1", servers[0].port, [name_of(high)], 0, 10000)
        assert store.get(f"{high}/k") == b"2"  # the second answers ASK
        both = {f"{high}/k": b"2", f"{high}/stays": b"2", f"{high}/none": b"2"}
        assert store.get_many(both) == {key: both[key] for key in [*both][:2]}, store.degraded  # no node has both: they say TRYAGAIN
        assert store.degraded is None
        second.migrate("127.0.0.1", servers[0].port, [name_of(high).replace("/k", "/stays")], 0, 10000)
        for node in (first, second):
            node.execute_command("CLUSTER SETSLOT", slot_of(high), "NODE", id_of(first))
        assert store.get(f"{high}/k") == b"2"  # and now MOVED
        assert store.put(f"{high}/k", b"3")
        assert store.degraded is None
        assert first.get(name_of(high)) == b"3"

        # The first goes down, and its replica takes over.
        replica.execute_command("READONLY")
        wait_for(lambda: [replica.get(name_of(folder)) for folder in (low, high)] == [b"1", b"3"], "the replica has not got them")
        servers[0].stop()
        assert not store.put(f"{low}/later", b"4")
        assert store.get(f"{low}/later") == b"4"
        assert store.degraded
        replica.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        wait_for(lambda: store.put(f"{high}/k", b"5"), "the replica did not take over")
        expected = {f"{low}/k": b"1", f"{high}/k": b"5", f"{low}/later": b"4"}
        assert store.get_many(expected) == expected
        assert store.degraded is None
        assert open_store(url).get_many(expected) == expected  # with what was kept meanwhile
        store.close()


@pytest.mark.timeout(180)
def test_a_cluster_over_tls(tmp_path):
    """The server of the tests ends no TLS itself: something before each node does."""
    with cluster_of(tls=True) as (_, nodes, ends):
        (tmp_path / "ca.pem").write_bytes(b"".join(end.ca.read_bytes() for end in ends))
        store = open_store(f"rediss+cluster://127.0.0.1:{ends[1].port}?timeout=20&ca={tmp_path}/ca.pem")
        values = {f"{folder}/k": folder.encode() for folder in "abcdef"}
        for key, value in values.items():
            assert store.put(key, value), store.degraded
        assert store.get_many(values) == values
        assert store.list("") == sorted(values)
        assert all(node.dbsize() for node in nodes)
        stranger = open_store(f"rediss+cluster://127.0.0.1:{ends[1].port}?timeout=20")
        assert stranger.get("a/k") is None
        assert "certificate verify failed" in stranger.degraded
        store.close()
