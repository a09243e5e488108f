"""Servers of which one is enough, asked side by side, and calls that end by a deadline, whatever they wait for.

Owns the threads for both, and the clients of a cluster and of what sentinels watch. redis-py tries the hosts that it is given in turn, a
timeout each, and waits for a host's name as long as the system does. Imported by `redis.py` alone, when it connects: it loads redis-py.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # which a socket loads for its first host otherwise
import functools
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import redis
import redis.cluster
import redis.sentinel

_T = TypeVar("_T")
_Calls = queue.SimpleQueue[tuple[Callable[[], Any], Callable[[tuple[Any, BaseException | None]], None]] | None]
_IDLE_S = 1.0  # without a call, after which a thread ends
_TAKEN_S = 60.0  # the same of one that was taken for a call: who took it may have been interrupted before it called
_NOT_UNDERSTOOD = (TypeError, ValueError, LookupError, AttributeError)  # what redis-py and the store raise over an answer of a wrong kind
_REFUSED = (redis.AuthenticationError, redis.exceptions.NoPermissionError)
_TOLD = 3  # servers whose reasons a message has room for


class GivenUp(Exception):
    """The time is over; what was called may go on, and nobody hears of it. It connects to nobody any more."""


def reason_of(error: BaseException) -> str:
    """What to say of what a trip raised."""
    named = f"{type(error).__name__}: {error}"
    return f"no answer of a Redis server ({named})" if isinstance(error, _NOT_UNDERSTOOD) else named


class _Trip(threading.local):
    """What this thread works for. given_up: None where that has no end."""

    given_up: threading.Event | None = None


_trip = _Trip()


def check_wanted(connection: Any = None) -> None:
    """redis.RedisError: this thread works for a trip that was given up: what it would send may be older than what a later one sent."""
    if _trip.given_up is not None and _trip.given_up.is_set():
        raise redis.RedisError("connected too late: the trip was given up")


def connect_if_wanted(connection: Any) -> None:
    """redis-py's `redis_connect_func`: what a connection that has just been made sends first."""
    check_wanted()
    connection.on_connect()
    check_wanted()


class Workers:
    """Threads for calls that end by a deadline. Who has answered takes the next call, or ends where none comes for a while: a new thread
    for each would cost more than the trip to a local server. Who was given up ends once what it was called for does."""

    def __init__(self) -> None:
        self._idle: list[_Calls] = []
        self._of = os.getpid()

    def within(self, limit_s: float, action: Callable[[], _T]) -> _T:
        """What `action` returns or raises, called by another thread. GivenUp: it has done neither after `limit_s`, or there is no time."""
        if limit_s <= 0:
            raise GivenUp
        done: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()
        given_up = threading.Event()

        def begin() -> _T:
            _trip.given_up = given_up
            check_wanted()
            return action()

        calls, answered = self._worker(), False
        calls.put((begin, done.put))
        try:
            value, error = done.get(timeout=limit_s)
            answered = True
        except queue.Empty:
            raise GivenUp from None
        finally:
            given_up.set()
            if answered:
                self._idle.append(calls)
            else:
                calls.put(None)
        try:
            if error is not None:
                raise error
            return value  # type: ignore[return-value]
        finally:
            del error  # whose traceback holds this frame

    def dismiss(self) -> None:
        """End those that wait for a call."""
        while self._idle:
            self._idle.pop().put(None)

    def _worker(self) -> _Calls:
        if self._of != os.getpid():  # a fork takes no threads along
            self._of = os.getpid()
            self._idle.clear()
        try:
            return self._idle.pop()
        except IndexError:
            calls: _Calls = queue.SimpleQueue()
            threading.Thread(target=_work, args=(calls, self._idle), name="moe_dist-store", daemon=True).start()
            return calls


def _work(calls: _Calls, idle: list[_Calls]) -> None:
    taken = False
    while True:
        try:
            call = calls.get(timeout=_TAKEN_S if taken else _IDLE_S)
        except queue.Empty:
            if taken:
                return
            try:
                idle.remove(calls)
            except ValueError:  # taken in this moment: the call comes
                taken = True
                continue
            return
        taken = False
        if call is None:
            return
        _answer(*call)
        del call  # it holds what the caller holds


def first_of(asked: Mapping[str, Callable[[], _T]], nobody: str) -> _T:
    """What the first of these calls that succeeds returns. redis.ConnectionError: none does; it says `nobody` and why, by their names.
    redis.AuthenticationError, NoPermissionError: one of them was refused, and none succeeds."""
    done: queue.SimpleQueue[tuple[str, _T | None, BaseException | None]] = queue.SimpleQueue()
    for name, action in asked.items():
        put = functools.partial(_put_named, done, name)
        threading.Thread(target=_answer, args=(action, put), name="moe_dist-store", daemon=True).start()
    errors: dict[str, BaseException] = {}
    try:
        for _ in asked:
            name, value, error = done.get()
            if error is None:
                return value  # type: ignore[return-value]
            if not isinstance(error, Exception):
                raise error
            errors[name] = error
        for error in errors.values():
            if isinstance(error, _REFUSED):
                raise error
        reasons = {name: reason_of(errors[name]).removeprefix("ConnectionError: ") for name in list(asked)[:_TOLD]}
        told = [reason if name in reason else f"{name}: {reason}" for name, reason in reasons.items()]
        more = f"; and {len(asked) - _TOLD} more" if len(asked) > _TOLD else ""
        raise redis.ConnectionError(f"{nobody}: {'; '.join(told)}{more}")
    finally:
        errors.clear()
        error = None


def _answer(action: Callable[[], Any], put: Callable[[tuple[Any, BaseException | None]], None]) -> None:
    try:
        put((action(), None))
    except BaseException as error:
        put((None, error))


def _put_named(done: queue.SimpleQueue[Any], name: str, answer: tuple[Any, BaseException | None]) -> None:
    done.put((name, *answer))


class Sentinels(redis.sentinel.Sentinel):  # type: ignore[misc]
    """Each is asked at once who is master, whenever somebody connects to it."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        def ask(sentinel: Any) -> tuple[str, int]:
            state = sentinel.sentinel_masters().get(service_name)
            if not state:
                raise redis.ConnectionError("it does not watch that service")
            if not self.check_master_state(state, service_name):
                raise redis.ConnectionError("it takes the master for lost")
            return state["ip"], state["port"]

        asked = {}
        for sentinel in self.sentinels:
            where = sentinel.connection_pool.connection_kwargs
            asked[f"{where['host']}:{where['port']}"] = functools.partial(ask, sentinel)
        return first_of(asked, "no sentinel names a master for the service of the URL")


def plain_host(host: str, port: int, timeout_s: float) -> str:
    """host:port. OSError: nobody there says a word of Redis's protocol without TLS."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(b"PING\r\n")
        if connection.recv(1) not in (b"+", b"-"):
            raise OSError("no answer in plain text")
    return f"{host}:{port}"


def connect_cluster(seeds: Sequence[tuple[str, int]], options: dict[str, Any]) -> Any:
    """A client of the cluster that the first of `seeds` to answer belongs to."""

    def ask(host: str, port: int) -> Any:
        seed = redis.cluster.ClusterNode(host, port)
        try:
            return redis.cluster.RedisCluster(
                startup_nodes=[seed], redis_connect_func=check_wanted, **options
            )  # it calls `on_connect` itself
        except redis.exceptions.RedisClusterException as error:
            raise _refusal_behind(error) or error from None

    return first_of({f"{host}:{port}": functools.partial(ask, host, port) for host, port in seeds}, "no seed of the cluster answers")


def _refusal_behind(error: BaseException | None) -> BaseException | None:
    """What redis-py takes for a node that is no cluster's, whatever it refuses CLUSTER for."""
    while error is not None and not isinstance(error, redis.exceptions.NoPermissionError):
        error = error.__cause__ or error.__context__
    return error
