"""What one real server gives to thousands of clients that ask at once: the rendezvous, and a Redis that holds an epoch. cli imports this."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from torch._C._distributed_c10d import TCPStore

from moe_dist.bench.scaling import KEYS, epoch_of
from moe_dist.bench.server import ServerLost
from moe_dist.errors import ConfigError, StoreError, first_line
from moe_dist.stores.redis_url import RedisAddress

CLIENTS = (64, 512, 4096)
PATIENCE_S = 60.0  # with a server that sends nothing
_LOADERS = 2  # processes, each with its part of the clients
_LIMIT_S = 300.0  # of one table's row
_OWN_FILES = 64  # that a process has open beside its clients'


def servers_table(
    redis_url: str,
    clients: Sequence[int] = CLIENTS,
    keys: int = max(KEYS),
    note: Callable[[str], None] = lambda line: None,
    patience_s: float = PATIENCE_S,
) -> Iterator[dict[str, Any]]:
    """Rows of server, clients, asks, requests, bytes, seconds, requests_per_s, bytes_per_s: so many clients ask one server at once.

    rendezvous: a TCPStore, asked for words of 64 bytes. redis: the server of `redis_url`, plain and without a password, each client
    asked for an epoch of so many keys. patience_s: with a server that sends nothing.
    ServerLost: the server ended, or gave no answer; the rows before are good.
    """
    import redis

    value = epoch_of(keys)[1]
    address = RedisAddress.parse(redis_url)
    client, name = address.connect(), f"moe_dist-bench-{time.monotonic_ns()}"
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("word", "w" * 64)
    # A torch client takes up to seconds to connect where no name server answers, so that the rendezvous has few.
    asked = [("rendezvous", min(clients), "a word", server.port), *(("redis", count, "an epoch", (redis_url, name)) for count in clients)]
    doing = "before it was asked"
    try:
        client.set(name, value)
        for kind, count, asks, where in asked:
            doing = f"while {count} clients asked {'it' if kind == 'redis' else 'the rendezvous'} for {asks}"
            each, seconds = _load(kind, count, where, patience_s)
            requests, nbytes = each * count, each * count * (len(value) if kind == "redis" else 64)
            row = {
                "server": kind, "clients": count, "asks": asks, "requests": requests, "bytes": nbytes, "seconds": round(seconds, 3),
                "requests_per_s": round(requests / seconds), "bytes_per_s": round(nbytes / seconds),
            }  # fmt: skip
            note(", ".join(f"{field} {said}" for field, said in row.items()))
            yield row
    except (redis.RedisError, _Unanswered) as error:
        raise ServerLost(
            f"the server {address.public} was lost {doing}: {first_line(error)}; if it lives, it may keep key {name}"
        ) from None
    finally:
        with contextlib.suppress(redis.RedisError):
            client.delete(name)
        client.close()


def require_room(redis_url: str, clients: Sequence[int] = CLIENTS) -> None:
    """ConfigError: this system, or the server of `redis_url`, lets not so many clients be connected at once. StoreError: it does not answer."""
    import redis

    most = max(clients)
    needed, (_, hard) = _files(most), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{most} clients open {needed} files in each of {_LOADERS} processes, and the limit here is {hard} (`ulimit -Hn`); raise it, or "
            f"take fewer --clients"
        )
    address = RedisAddress.parse(redis_url)
    with contextlib.closing(address.connect()) as client:
        try:
            found = client.info("clients")
        except redis.ResponseError:  # it does not say
            return
        except redis.RedisError as error:
            raise StoreError(f"the server {address.public} can't be used: {first_line(error)}") from None
    limit, connected = int(found.get("maxclients", most + 1)), int(found.get("connected_clients", 0))
    if limit < most + connected:
        raise ConfigError(
            f"the server {address.public} takes {limit} clients at once (its maxclients, which its open files bound), and {most} are to ask it; "
            f"start it with --maxclients {most + connected + 1} and `ulimit -n {most + connected + 33}`, or take fewer --clients"
        )


def _files(clients: int) -> int:
    """That each of the processes which ask has open."""
    return -(-clients // _LOADERS) + _OWN_FILES


class _Unanswered(Exception):
    """A client got no answer, or none that is one; the message says why."""


def _load(kind: str, clients: int, where: Any, patience_s: float) -> tuple[int, float]:
    """(requests of each client, seconds until all are answered). _Unanswered: one of them was not."""
    each = max(1, 16_384 // clients) if kind == "rendezvous" else 1
    forks = multiprocessing.get_context("forkserver")  # which `ranks` has given torch
    pipes, loaders = [], []
    try:
        for _ in range(_LOADERS):
            near, far = forks.Pipe()
            pipes.append(near)
            arguments = (kind, clients // _LOADERS, each, where, far, patience_s)
            loaders.append(forks.Process(target=_load_in_a_process, args=arguments, daemon=True))
            loaders[-1].start()
            far.close()  # so that a process that is killed is noticed
        _hear(pipes)
        started = time.monotonic()
        for pipe in pipes:
            pipe.send(None)
        _hear(pipes)
        return each, time.monotonic() - started
    finally:
        for pipe in pipes:
            pipe.close()  # who waits to begin ends
        for loader in loaders:
            loader.join(1)
            loader.kill()
            loader.join()


def _hear(pipes: Sequence[Connection]) -> None:
    """Until each process has said that it is done. _Unanswered: one has met something else."""
    waiting, until = list(pipes), time.monotonic() + _LIMIT_S
    while waiting:
        ready = wait(waiting, max(0.0, until - time.monotonic()))
        if not ready:
            raise _Unanswered(f"not all were answered in {_LIMIT_S:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                reason = pipe.recv()
            except (EOFError, OSError):
                raise _Unanswered("a process of ours that asks was killed") from None
            if reason:
                raise _Unanswered(reason)
            waiting.remove(pipe)


def _load_in_a_process(kind: str, clients: int, each: int, where: Any, pipe: Connection, patience_s: float) -> None:
    def meet() -> None:
        pipe.send("")
        pipe.recv()

    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < (needed := _files(clients * _LOADERS)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        _LOADS[kind](clients, each, where, meet, patience_s)
        said = ""
    except EOFError:  # another was not answered
        return
    except Exception as error:  # said by who started this, on one line
        said = str(error) if isinstance(error, _Unanswered) else f"{type(error).__name__}: {first_line(error)}"
    with contextlib.suppress(OSError):
        pipe.send(said)


def _load_rendezvous(clients: int, each: int, port: int, meet: Callable[[], None], patience_s: float) -> None:
    stores = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(clients)]
    meet()
    for _ in range(each):
        for store in stores:
            store.get("word")


def _load_redis(clients: int, each: int, where: tuple[str, str], meet: Callable[[], None], patience_s: float) -> None:
    url, name = where
    ((host, port),) = RedisAddress.parse(url).hosts
    sockets = [socket.create_connection((host, port), timeout=patience_s) for _ in range(clients)]
    meet()
    for asking in sockets:
        asking.sendall(b"GET %b\r\n" % name.encode())
    left: dict[Any, int] = {}  # bytes of each client's answer, once its head is there
    heads = dict.fromkeys(sockets, b"")
    part = bytearray(1 << 18)
    with selectors.DefaultSelector() as selector:
        for asking in sockets:
            selector.register(asking, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(patience_s)  # of all, since a server which is slow lets one of thousands wait for long
            if not ready:
                raise _Unanswered(f"it sent nothing for {patience_s:g} s")
            for place, _ in ready:
                asking = cast(socket.socket, place.fileobj)
                if not (got := asking.recv_into(part)):
                    raise _Unanswered("it closed a connection")
                if asking not in left:
                    heads[asking] += part[:got]
                    head, end, rest = heads[asking].partition(b"\r\n")
                    if not end:
                        continue
                    if not head.startswith(b"$") or head == b"$-1":  # it refuses, or was started again and holds nothing
                        raise _Unanswered(f"it answered {head[:100].decode('ascii', 'replace')!r} instead of the epoch")
                    left[asking], got = int(head[1:]) + 2, len(rest)
                left[asking] -= got
                if left[asking] <= 0:
                    selector.unregister(asking)


_LOADS: Mapping[str, Callable[..., None]] = {"rendezvous": _load_rendezvous, "redis": _load_redis}
