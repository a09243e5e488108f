"""What one real server gives to thousands of clients that ask at once: the rendezvous, and a Redis that holds an epoch. cli imports this."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import TCPStore

from moe_dist.bench.scaling import KEYS, epoch_of
from moe_dist.stores.redis_url import RedisAddress

CLIENTS = (64, 512, 4096)
_LOADERS = 2  # processes, each with its part of the clients


def servers_table(
    redis_url: str, clients: Sequence[int] = CLIENTS, keys: int = max(KEYS), note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Rows of server, clients, asks, requests, bytes, seconds, requests_per_s, bytes_per_s: so many clients ask one server at once.

    rendezvous: a TCPStore, asked for words of 64 bytes. redis: the server of `redis_url`, plain and without a password, each client
    asked for an epoch of so many keys.
    """
    rows: list[dict[str, Any]] = []
    value = epoch_of(keys)[1]
    client = RedisAddress.parse(redis_url).connect()
    name = f"moe_dist-bench-{time.monotonic_ns()}"
    client.set(name, value)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("word", "w" * 64)
    # A torch client takes up to seconds to connect where no name server answers, so that the rendezvous has few.
    asked = [("rendezvous", min(clients), "a word", server.port), *(("redis", count, "an epoch", (redis_url, name)) for count in clients)]
    try:
        for kind, count, asks, where in asked:
            each, seconds = _load(kind, count, where)
            requests, nbytes = each * count, each * count * (len(value) if kind == "redis" else 64)
            rows.append(
                {
                    "server": kind, "clients": count, "asks": asks, "requests": requests, "bytes": nbytes, "seconds": round(seconds, 3),
                    "requests_per_s": round(requests / seconds), "bytes_per_s": round(nbytes / seconds),
                }
            )  # fmt: skip
            note(", ".join(f"{field} {said}" for field, said in rows[-1].items()))
    finally:
        client.delete(name)
        client.close()
    return rows


def _load(kind: str, clients: int, where: Any) -> tuple[int, float]:
    """(requests of each client, seconds until all are answered)."""
    each = max(1, 16_384 // clients) if kind == "rendezvous" else 1
    forks = multiprocessing.get_context("forkserver")  # which `ranks` has given torch
    ready, ended = forks.Barrier(_LOADERS + 1), forks.Barrier(_LOADERS + 1)
    loaders = [
        forks.Process(target=_load_in_a_process, args=(kind, clients // _LOADERS, each, where, ready, ended), daemon=True)
        for _ in range(_LOADERS)
    ]
    for loader in loaders:
        loader.start()
    try:
        ready.wait(300)
        started = time.monotonic()
        ended.wait(300)
        return each, time.monotonic() - started
    finally:
        for loader in loaders:
            loader.join(30)
            loader.kill()


def _load_in_a_process(kind: str, clients: int, each: int, where: Any, ready: Any, ended: Any) -> None:
    try:
        _LOADS[kind](clients, each, where, ready, ended)
    except BaseException:
        ready.abort()  # nobody waits for this one
        ended.abort()
        raise


def _load_rendezvous(clients: int, each: int, port: int, ready: Any, ended: Any) -> None:
    stores = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(clients)]
    ready.wait(300)
    for _ in range(each):
        for store in stores:
            store.get("word")
    ended.wait(300)


def _load_redis(clients: int, each: int, where: tuple[str, str], ready: Any, ended: Any) -> None:
    url, name = where
    ((host, port),) = RedisAddress.parse(url).hosts
    sockets = [socket.create_connection((host, port), timeout=60) for _ in range(clients)]
    ready.wait(300)
    for asking in sockets:
        asking.sendall(b"GET %b\r\n" % name.encode())
    part = bytearray(1 << 18)
    for asking in sockets:
        got = asking.recv_into(part)
        head, _, _ = bytes(part[:got]).partition(b"\r\n")
        left = len(head) + 2 + int(head[1:]) + 2 - got
        while left:
            left -= asking.recv_into(part)
    ended.wait(300)


_LOADS: Mapping[str, Callable[..., None]] = {"rendezvous": _load_rendezvous, "redis": _load_redis}
