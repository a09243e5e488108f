"""A store on a Redis server (Valkey and the like), over redis-py; the extra `moe-dist[redis]`. Its URLs: `redis_url.py`.

Key a/b/c is the string PREFIX:{a/b}/c. The braces are a hash tag: on a cluster the keys of one folder lie in one slot, so an
environment's entries are read in bulk from one node. A bulk read is one pipeline, without a transaction, of at most 10,000 keys (again a
command at a time where the server ends that connection); on a cluster one command of at most 1,000. A value is one SET, an epoch with its
entries included, so a reader sees all of it or none.

No trip to the server waits longer than three timeouts in all, whatever it waits for: attempts, host names, seeds and sentinels (asked
side by side), an answer that comes by drops. Then the server is left alone for a while. A listing of a large database may take
`_SCAN_LIMIT_S`, and says at each of its trips that it goes on. Pauses differ from process to process, so that a thousand ranks which lost
a server together do not come back together. What is wrong is said with what to do about it (`_WAYS_OUT`), and never with a password.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from moe_dist.errors import StoreError
from moe_dist.stores.base import KEY
from moe_dist.stores.degrade import DegradingStore, Unavailable, spread
from moe_dist.stores.redis_url import SENT, RedisAddress

_CHUNK = 1000  # keys a command: a reply of a few MB, which holds the server for milliseconds
_COMMANDS = 10  # a trip: a server that is asked faster than it can send keeps the replies, for each who reads at once
_ATTEMPTS = 3
_SCAN_LIMIT_S = 30.0
# What to do about a reason, by words of it: those of servers are the same in Redis and Valkey.
_WAYS_OUT = {
    "in plain text": "write redis:// for a server without TLS, or give its TLS port",
    "PEM lib|NO_CERTIFICATE|KEY_VALUES|key values": "ca, cert and key must be PEM files, the last two of one pair, and the key not encrypted",
    "mismatch": "name the host as its certificate does",
    "CERTIFICATE_VERIFY_FAILED": "name a file of the authority that signed its certificate by ca=FILE",
    "(?i)violation of protocol|certificate.required|handshake.failure": "if it asks its clients for a certificate, name one by cert=FILE, key=FILE",
    "already authenticated|Authentication required": "it asks for a login: redis://USER:PASSWORD@HOST, without USER for the default one",
    "username-password|WRONGPASS|invalid password": "correct user and password in the URL (%-encoded)",
    "without any password configured|but no password is set|unknown command .?AUTH": "it asks for no login: leave it out of the URL",
    "NoPermission.*'sentinel": "let the ACL of the sentinels allow {refused}",
    "NoPermission.*database": "let its ACL allow that database, or name another",
    "NoPermission": "let its ACL allow ~{prefix}:* {needed}",
    r"Error 2 connecting to [^/]*:\d": "ca, cert and key must name files of this host",
    "DB index": "name a database that it has: /0",
    "Cluster mode is not enabled": "write redis:// for a server alone",
    "unknown command 'SENTINEL'": "it is no sentinel: write redis:// for a server",
    "DENIED": "give it a password, or let it take clients of other hosts (bind, protected-mode)",
    "max number of clients": "raise its maxclients, or end clients of it",
    "MISCONF": "give its disk room, or let it go on (stop-writes-on-bgsave-error)",
    "NoReplicas|NOREPLICAS": "start its replicas, or ask for fewer (min-replicas-to-write)",
    "MovedError": "write redis+cluster:// for a cluster",
    "ReadOnlyError|MasterDown|MASTERDOWN": "name the master, or its sentinels by redis+sentinel://",
    "OutOfMemory": "raise its maxmemory, or let it evict (maxmemory-policy)",
}
_REFUSED = re.compile(r"NoPermission.* the '([a-z|]+)' command")
_NO_HANDSHAKE = re.compile("Timeout connecting|WRONG_VERSION|EOF")
# Of a server that has never answered: what one that speaks TLS does when it is not spoken to in TLS.
_PERHAPS_TLS = re.compile("reset by peer|closed by server|Broken pipe|Protocol Error")
_QUOTED = ", with args beginning with:"  # what follows is what it was sent, cut anywhere
_MOST_SAID = 300  # characters of a server's words: some bring a page of advice
_T = TypeVar("_T")


class RedisStore(DegradingStore):
    """connect: makes a client (redis.Redis or redis.RedisCluster), at the first use and after each failure: a cluster's asks all seeds
    anew.

    url: fit for logs. cluster: the client talks to a cluster, whose bulk reads stay within a slot. tls: the hosts that are to speak TLS.
    ttl: None: values stay. secrets: what no message may hold anywhere; names: nor as a word. needs: the commands that are said where an ACL refuses one.
    retry_after: how long a server that failed is left alone.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        url: str,
        prefix: str = "moe_dist",
        ttl: timedelta | None = None,
        timeout: timedelta = timedelta(seconds=2),
        cluster: bool = False,
        tls: Sequence[tuple[str, int]] = (),
        secrets: Sequence[str] = (),
        names: Sequence[str] = (),
        needs: Sequence[str] = SENT,
        retry_after: timedelta = timedelta(seconds=30),
    ) -> None:
        from moe_dist.stores.seeds import Workers

        super().__init__(url, retry_after=retry_after)
        self._workers = Workers()
        self._connect = connect
        self._client: Any = None
        self._prefix = prefix
        self._ttl_ms = None if ttl is None else round(ttl.total_seconds() * 1000)
        self._limit_s = 3 * timeout.total_seconds()
        self._cluster = cluster
        self._tls = tls
        self._answered = False
        self._masks = _masks(secrets, names)
        self._needs = needs

    @classmethod
    def from_url(cls, url: str, *, retry_after: timedelta = timedelta(seconds=30)) -> RedisStore:
        """StoreError: the URL is wrong, or redis-py is not installed. Does not connect."""
        address = RedisAddress.parse(url)
        try:
            import redis  # noqa: F401

            import moe_dist.stores.seeds  # noqa: F401  # now, and not while ranks wait for the first trip
        except ImportError:
            raise StoreError(f"store {address.public} needs redis-py; install moe-dist[redis]") from None
        store = cls(
            address.connect,
            url=address.public,
            prefix=address.prefix,
            ttl=address.ttl,
            timeout=address.timeout,
            cluster=address.kind == "cluster",
            tls=address.hosts if address.tls else (),
            secrets=address.secrets(),
            names=address.names(),
            needs=address.needs,
            retry_after=retry_after,
        )
        if not store._cluster:  # whose client connects at once
            store._client = address.connect()  # here, where nobody waits: redis-py looks up which release it is
        return store

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._workers.dismiss()

    def _read(self, keys: list[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for trip in self._trips(keys):
            answers = self._call(_Bulk([[self._name(key) for key in chunk] for chunk in trip]))
            for chunk, values in zip(trip, answers, strict=True):
                found.update((key, value) for key, value in zip(chunk, values, strict=True) if value is not None)
        return found

    def _write(self, key: str, value: bytes) -> None:
        self._call(lambda client: _set(self._name(key), value, self._ttl_ms, client))

    def _remove(self, key: str) -> None:
        self._call(lambda client: _delete(self._name(key), client))

    def _scan(self, prefix: str) -> set[str]:
        """{prefix} and {prefix/...} are the tags that a key under `prefix` can have."""
        pattern = f"{self._prefix}:{{{prefix}[}}/]*" if prefix else f"{self._prefix}:{{*"
        until_s = time.monotonic() + _SCAN_LIMIT_S
        nodes = self._call(lambda client: client.get_primaries()) if self._cluster else [None]
        keys: set[str] = set()
        for node in nodes:
            cursor = None
            while cursor != 0:
                if time.monotonic() > until_s:
                    raise Unavailable(f"SCAN took more than {_SCAN_LIMIT_S:.0f} s; give moe_dist a database of its own")
                cursor, names = self._call(functools.partial(_scan_on, node, cursor or 0, pattern))
                keys.update(key for name in names if (key := self._key(name)) is not None)
        return keys

    def _name(self, key: str) -> str:
        folder, _, name = key.rpartition("/")
        return f"{self._prefix}:{{{folder}}}/{name}"

    def _key(self, name: bytes) -> str | None:
        """None: a key of somebody else that looks like ours."""
        folder, closing, last = name.decode("ascii", "replace").removeprefix(f"{self._prefix}:{{").rpartition("}/")
        key = f"{folder}/{last}" if folder else last
        return key if closing and KEY.fullmatch(key) else None

    def _trips(self, keys: list[str]) -> Iterator[list[list[str]]]:
        """The keys of each command of each trip; on a cluster a trip goes to one slot, which is one command's."""
        groups: dict[str, list[str]] = {}
        for key in keys:
            groups.setdefault(key.rpartition("/")[0] if self._cluster else "", []).append(key)
        for group in groups.values():
            chunks = [group[at : at + _CHUNK] for at in range(0, len(group), _CHUNK)]
            commands = 1 if self._cluster else _COMMANDS
            yield from (chunks[at : at + commands] for at in range(0, len(chunks), commands))

    def _call(self, command: Callable[[Any], _T]) -> _T:
        """Unavailable: the server can't be reached within the limit (it then rests), or refuses."""
        import redis

        from moe_dist.stores.seeds import GivenUp

        until_s = time.monotonic() + self._limit_s
        last: Exception | None = None
        for attempt in range(_ATTEMPTS):
            if last is not None:
                time.sleep(min(spread(0.05 * 2 ** (attempt - 1)), max(until_s - time.monotonic(), 0.0)))
            client = self._client
            try:
                if client is None:
                    client = self._client = self._workers.within(until_s - time.monotonic(), self._connect)
                answer = self._workers.within(until_s - time.monotonic(), functools.partial(command, client))
            except GivenUp:
                last = last or TimeoutError(f"no answer within {self._limit_s:g} s")
            except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.RedisClusterException) as error:  # incl. a wrong password
                last = error
            except redis.RedisError as error:  # the server answers, and says no: read-only, out of memory, no permission
                raise Unavailable(self._words(error)) from None
            except Exception as error:  # no route, no thread, no such answer, a connection closed by another thread
                last = error
            else:
                self._report()
                self._answered = True
                return answer
            self._drop(client)
            self._report()
            if isinstance(last, redis.AuthenticationError) or time.monotonic() >= until_s:
                break
            if (
                attempt == 0
                and self._tls
                and not self._answered
                and _NO_HANDSHAKE.search(str(last))
                and (plain := self._plain_host(until_s))
            ):
                last = redis.ConnectionError(f"{plain} answers in plain text, not over TLS")
                break
        assert last is not None
        raise Unavailable(self._words(last), rest=True) from None

    def _plain_host(self, until_s: float) -> str | None:
        """Which of the hosts answers without TLS: it waits for the rest of a line, and the handshake for it."""
        from moe_dist.stores.seeds import first_of, plain_host

        asked = {f"{host}:{port}": functools.partial(plain_host, host, port, self._limit_s / 3) for host, port in self._tls}
        with contextlib.suppress(Exception):  # none does, or it can't be told
            return self._workers.within(until_s - time.monotonic(), lambda: first_of(asked, ""))
        return None

    def _drop(self, client: Any) -> None:
        """Have the next trip connect anew. It ends what still waits, and leaves it no connection that a later trip opens."""
        if self._client is client:
            self._client = None
        with contextlib.suppress(Exception):
            _hang_up(client)

    def _words(self, error: Exception) -> str:
        from moe_dist.stores.seeds import reason_of

        said = reason_of(error)
        words = said.partition(_QUOTED)[0]
        for mask in self._masks:
            words = mask.sub("***", words)
        words = words if len(words) <= _MOST_SAID else words[:_MOST_SAID].rsplit(" ", 1)[0] + " ..."
        for known, way_out in _WAYS_OUT.items():
            if re.search(known, said):
                refused = [f"+{name}" for name in _REFUSED.findall(words)]
                needed = dict.fromkeys([*(f"+{name}" for name in self._needs), *refused])
                return f"{words.rstrip('. ')}; {way_out.format(prefix=self._prefix, needed=' '.join(needed), refused=' '.join(refused))}"
        if not self._tls and not self._answered and _PERHAPS_TLS.search(words):
            return f"{words.rstrip('. ')}; if it speaks TLS, write rediss://"
        return words


def _masks(secrets: Sequence[str], names: Sequence[str]) -> list[re.Pattern[str]]:
    """Of all the ways in which a message may quote them, the longest first: one may be a part of another."""
    quotes = (str, functools.partial(urllib.parse.quote, safe=""), urllib.parse.quote_plus, ascii)
    forms = {quote(word).strip("'\"") or word: word in secrets for word in (*names, *secrets) for quote in quotes}
    return [
        re.compile(re.escape(form) if anywhere else rf"(?<!\w){re.escape(form)}(?!\w)")
        for form, anywhere in sorted(forms.items(), key=lambda item: -len(item[0]))
    ]


def _hang_up(client: Any) -> None:
    """Close a client's connections, those in use too; releases of redis-py differ in whether `close` does."""
    if (pool := getattr(client, "connection_pool", None)) is not None:
        pool.disconnect(inuse_connections=True)
    elif client is not None:
        client.close()


def _scan_on(node: Any, cursor: int, pattern: str, client: Any) -> tuple[int, list[bytes]]:
    """One trip of a listing. node: of a cluster; None: the server is none."""
    if node is None:
        at, names = client.scan(cursor, match=pattern, count=_CHUNK)
    else:
        cursors, names = client.scan(cursor, match=pattern, count=_CHUNK, target_nodes=node)
        at = cursors[node.name]
    if not _is_list(names, bytes):
        raise TypeError("SCAN's answer has no list of names")
    return at, names


class _Bulk:
    """A bulk read's trip: all commands at once, and if that fails, when it is tried again, one after the other: a server that bounds what
    it keeps for a client (client-output-buffer-limit, maxmemory-clients) ends the connection of who asks for too much at once."""

    def __init__(self, chunks: list[list[str]]) -> None:
        self._chunks, self._at_once = chunks, True

    def __call__(self, client: Any) -> list[list[bytes | None]]:
        at_once, self._at_once = self._at_once, False
        if at_once:
            return _mget(self._chunks, client)
        return [values for chunk in self._chunks for values in _mget([chunk], client)]


def _mget(chunks: list[list[str]], client: Any) -> list[list[bytes | None]]:
    """One trip: each command's names, each command's values."""
    if len(chunks) == 1:
        answers = [_mget_one(chunks[0], client)]
    else:
        with client.pipeline(transaction=False) as pipeline:
            for names in chunks:
                pipeline.mget(names)
            answers = pipeline.execute(raise_on_error=False)  # which would put all the names into its message
    for names, values in zip(chunks, answers, strict=True):
        if isinstance(values, Exception):
            raise values
        if not _is_list(values, bytes | None) or len(values) != len(names):
            raise TypeError(f"MGET's answer is no list of {len(names)} values")
    return answers


def _mget_one(names: list[str], client: Any) -> Any:
    """One command's answer; a command a name where it has none: amid the move of a cluster's slot no node has all of them."""
    import redis

    try:
        return client.mget(names)
    except (redis.exceptions.TryAgainError, redis.exceptions.ClusterError) as error:
        if len(names) == 1 or isinstance(error, redis.exceptions.ClusterDownError):
            raise
    return [_mget([[name]], client)[0][0] for name in names]


def _is_list(answer: Any, kind: Any) -> bool:
    return isinstance(answer, list) and all(isinstance(item, kind) for item in answer)


def _set(name: str, value: bytes, ttl_ms: int | None, client: Any) -> None:
    if client.set(name, value, px=ttl_ms) is not True:
        raise TypeError("SET's answer is not OK")


def _delete(name: str, client: Any) -> None:
    if not isinstance(client.delete(name), int):
        raise TypeError("DEL's answer is no number")
