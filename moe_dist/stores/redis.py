"""A store on a Redis server (Valkey and the like), over redis-py; the extra `moe-dist[redis]`.

    redis://[user:password@]host[:port][/db]            rediss:// the same over TLS
    unix://[user:password@]/path/to/socket[?db=0]
    redis+sentinel://[user:password@]host[:port],host[:port].../service[/db]
    redis+cluster://[user:password@]host[:port],host[:port]...       rediss+sentinel:// and rediss+cluster:// over TLS

Query parameters: `prefix` of the keys ("moe_dist"), `ttl` in seconds (none), `timeout` in seconds of a connect, a read or a
write (2), `db`, `ca` (a file of certificates to trust), `cert` and `key` (files of our own), `verify` (yes, no),
`sentinel_user` and `sentinel_password`.

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
import dataclasses
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

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
PARAMETERS = ("prefix", "ttl", "timeout", "db", "ca", "cert", "key", "verify", "sentinel_user", "sentinel_password")
TWO_STORES = "two stores, the local one first, are layered:LOCAL,SHARED"
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # nothing that SCAN's patterns or a hash tag would take for its own
_PORTS = {"sentinel": 26379}
_CHUNK = 1000  # keys a command: a reply of a few MB, which holds the server for milliseconds
_COMMANDS = 10  # a trip: a server that is asked faster than it can send keeps the replies, for each who reads at once
_ATTEMPTS = 3
_SENT = ("mget", "set", "del", "scan")  # what a store sends; redis-py sends more, of which it does without some
_SCAN_LIMIT_S = 30.0
# What to do about a reason, by words of it: those of servers are the same in Redis and Valkey.
_WAYS_OUT = {
    "in plain text": "write redis:// for a server without TLS, or give its TLS port",
    "mismatch": "name the host as its certificate does",
    "CERTIFICATE_VERIFY_FAILED": "name a file of the authority that signed its certificate by ca=FILE",
    "already authenticated|Authentication required": "it asks for a login: redis://USER:PASSWORD@HOST, without USER for the default one",
    "username-password|WRONGPASS": "correct user and password in the URL (%-encoded)",
    "without any password configured": "it asks for no login: leave it out of the URL",
    "NoPermission.*'sentinel": "let the ACL of the sentinels allow {refused}",
    "NoPermission.*database": "let its ACL allow that database, or name another",
    "NoPermission": "let its ACL allow ~{prefix}:* {needed}",
    r"Error 2 connecting to [^/]*:\d": "ca, cert and key must name files of this host",
    "DB index": "name a database that it has: /0",
    "Cluster mode is not enabled": "write redis:// for a server alone",
    "unknown command 'SENTINEL'": "it is no sentinel: write redis:// for a server",
    "MovedError": "write redis+cluster:// for a cluster",
    "ReadOnlyError": "name the master, or its sentinels by redis+sentinel://",
    "OutOfMemory": "raise its maxmemory, or let it evict (maxmemory-policy)",
}
_REFUSED = re.compile(r"NoPermission.* the '([a-z|]+)' command")
_NO_HANDSHAKE = re.compile("Timeout connecting|WRONG_VERSION|EOF")
# Of a server that has never answered: what one that speaks TLS does when it is not spoken to in TLS.
_PERHAPS_TLS = re.compile("reset by peer|closed by server|Broken pipe|Protocol Error")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """What a URL says. hosts: one for a plain server, seeds for Sentinel and Cluster, none for a socket `path`."""

    kind: str  # "", "sentinel" or "cluster"
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    service: str = ""
    db: int = 0
    user: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    sentinel_user: str | None = None
    sentinel_password: str | None = dataclasses.field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    verify: bool = True
    prefix: str = "moe_dist"
    ttl: timedelta | None = None
    timeout: timedelta = timedelta(seconds=2)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """StoreError: not one of the forms above; the message holds no password."""
        scheme, _, rest = url.partition("://")
        where, _, query = rest.partition("?")
        login, _, place = where.rpartition("@")
        # Without a login only the beginning is shown, and nothing of what can't be hosts: it may be a login whose host was forgotten.
        shown = place if login or place.startswith("/") else re.split("[:/,]", place)[0]
        shown = shown if re.fullmatch(r"[A-Za-z0-9._:/,\[\]-]*" if login else "[A-Za-z0-9._/ -]*", shown) else "..."

        def wrong(what: str) -> StoreError:
            return StoreError(f"store URL {scheme}://{shown}: {what}")

        if "@" in query:
            raise StoreError(f"store URL {scheme}://...: a '?' inside a user or password must be written %3F")
        if scheme not in SCHEMES:
            raise wrong(f"the scheme is none of {', '.join(SCHEMES)}")
        base, _, kind = scheme.partition("+")
        given = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if unknown := sorted(set(given) - set(PARAMETERS)):
            named = [name for name in unknown if re.fullmatch("[a-z_-]{1,24}", name) and f"{name}=" in query]
            # The rest may be the end of a password with a '?'.
            raise wrong(f"unknown parameter {', '.join(named) or 'whose name is none'}; known are {', '.join(PARAMETERS)}")
        user, _, password = (urllib.parse.unquote(word) for word in login.partition(":"))
        hosts, _, path = place.partition("/")
        if base == "unix" and (hosts or not path):
            raise wrong("the path of a socket begins with a '/': unix:///run/redis.sock")
        if not kind and base != "unix" and "," in place:
            raise wrong(f"it names one server, but has a comma; {TWO_STORES}, several hosts redis+cluster:// or redis+sentinel://")
        service, _, db = path.partition("/") if kind == "sentinel" else ("", "", path)
        if kind == "sentinel" and not service:
            raise wrong("name the service that the sentinels watch: redis+sentinel://host:26379/service/db")
        told = bool(login) or ":" not in place  # else the rest may be a password
        try:
            seeds = [] if base == "unix" else [_host_port(host, _PORTS.get(kind, 6379), told=told) for host in hosts.split(",")]
        except ValueError as error:
            # Without a login it may be one.
            raise wrong(f"{error}; write {scheme}://{'' if login else '[USER:PASSWORD@]'}HOST:PORT") from None
        database = given.get("db") or ("0" if base == "unix" else db) or "0"
        if not re.fullmatch("[0-9]{1,9}", database):
            raise wrong(
                f"the database{_said(database) if told or 'db' in given else ''} is no number; write {'?db=0' if base == 'unix' else '/0'}"
            )

        def seconds(name: str) -> timedelta | None:
            if name not in given:
                return None
            with contextlib.suppress(ValueError, OverflowError):
                return timedelta(seconds=float(given[name]))
            way_out = f"; {TWO_STORES}" if "," in given[name] else ""
            raise wrong(f"{name}{_said(given[name])} is no number of seconds{way_out}")

        ttl, timeout = seconds("ttl"), seconds("timeout")
        if given.get("verify", "yes") not in ("yes", "no"):
            raise wrong(f"verify{_said(given['verify'])} is neither yes nor no")
        address = cls(
            kind=kind,
            tls=base == "rediss",
            hosts=tuple(seeds),
            path=urllib.parse.unquote("/" + path) if base == "unix" else None,
            service=service,
            db=int(database),
            user=user or None,
            password=password or None,
            sentinel_user=given.get("sentinel_user"),
            sentinel_password=given.get("sentinel_password"),
            ca=given.get("ca"),
            cert=given.get("cert"),
            key=given.get("key"),
            verify=given.get("verify", "yes") == "yes",
            prefix=given.get("prefix", cls.prefix),
            ttl=ttl,
            timeout=cls.timeout if timeout is None else timeout,
        )
        if kind == "cluster" and address.db:
            raise wrong("a cluster has no databases; leave db out")
        if not _PREFIX.fullmatch(address.prefix):
            raise wrong(f"prefix {address.prefix!r}; use 1 to 64 letters, digits, '.', '_', ':' or '-'")
        if address.ttl is not None and address.ttl < timedelta(seconds=1):
            raise wrong("ttl is below a second")
        if not timedelta(milliseconds=10) <= address.timeout <= timedelta(seconds=60):
            raise wrong("timeout is outside 0.01 to 60 seconds")
        return address

    @property
    def public(self) -> str:
        """The URL without login and parameters."""
        scheme = ("rediss" if self.tls else "redis") + (f"+{self.kind}" if self.kind else "")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        if self.path is not None:
            return f"unix://{self.path}?db={self.db}"
        return f"{scheme}://{hosts}" + (f"/{self.service}" if self.service else "") + ("" if self.kind == "cluster" else f"/{self.db}")

    @property
    def needs(self) -> tuple[str, ...]:
        """The commands that the server's ACL must allow."""
        select = ("select",) if self.db else ()
        cluster = ("cluster|slots", "command", "asking") if self.kind == "cluster" else ()  # the last in the middle of a slot's move
        return (*_SENT, *select, *cluster)

    def secrets(self) -> list[str]:
        return [secret for secret in (self.password, self.sentinel_password) if secret]

    def connect(self) -> Any:
        """A redis-py client that retries nothing by itself (the store does). ImportError: redis-py is missing."""
        import redis
        import redis.backoff
        import redis.retry

        from moe_dist.stores.seeds import Sentinels, connect_cluster, connect_if_wanted

        seconds = self.timeout.total_seconds()
        # Said, not left to redis-py, whose releases differ in whether a trusted certificate must be of the host that was asked.
        checks = {"ssl_cert_reqs": "required" if self.verify else "none", "ssl_check_hostname": self.verify}
        tls = {"ssl": True, "ssl_ca_certs": self.ca, "ssl_certfile": self.cert, "ssl_keyfile": self.key, **checks}
        common = {
            "socket_timeout": seconds,
            "socket_connect_timeout": seconds,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            "protocol": 2,  # which every server and proxy speaks: newer releases of redis-py ask for 3 by HELLO, that not all of them know
            **(tls if self.tls else {}),
        }
        login = {"username": self.user, "password": self.password}
        wanted = {"redis_connect_func": connect_if_wanted}
        if self.path is not None:
            del common["socket_connect_timeout"]
            return redis.Redis(unix_socket_path=self.path, db=self.db, **login, **common, **wanted)
        if self.kind == "sentinel":
            sentinel_login = {"username": self.sentinel_user, "password": self.sentinel_password}
            watchers = Sentinels(self.hosts, sentinel_kwargs={**sentinel_login, **common})
            return watchers.master_for(self.service, db=self.db, **login, **common, **wanted)
        if self.kind == "cluster":
            return connect_cluster(self.hosts, {**login, **common})
        ((host, port),) = self.hosts
        return redis.Redis(host=host, port=port, db=self.db, **login, **common, **wanted)


class RedisStore(DegradingStore):
    """connect: makes a client (redis.Redis or redis.RedisCluster), at the first use and after each failure: a cluster's asks all seeds
    anew.

    url: fit for logs. cluster: the client talks to a cluster, whose bulk reads stay within a slot. tls: the hosts that are to speak TLS.
    ttl: None: values stay. secrets: words that no message may hold. needs: the commands that are said where an ACL refuses one.
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
        needs: Sequence[str] = _SENT,
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
        self._secrets = secrets
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

        words = reason_of(error)
        for secret in self._secrets:
            for form in (secret, urllib.parse.quote(secret, safe="")):
                words = words.replace(form, "***")
        for said, way_out in _WAYS_OUT.items():
            if re.search(said, words):
                refused = [f"+{name}" for name in _REFUSED.findall(words)]
                needed = dict.fromkeys([*(f"+{name}" for name in self._needs), *refused])
                return f"{words.rstrip('. ')}; {way_out.format(prefix=self._prefix, needed=' '.join(needed), refused=' '.join(refused))}"
        if not self._tls and not self._answered and _PERHAPS_TLS.search(words):
            return f"{words.rstrip('. ')}; if it speaks TLS, write rediss://"
        return words


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
        answers = [client.mget(chunks[0])]
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


def _is_list(answer: Any, kind: Any) -> bool:
    return isinstance(answer, list) and all(isinstance(item, kind) for item in answer)


def _set(name: str, value: bytes, ttl_ms: int | None, client: Any) -> None:
    if client.set(name, value, px=ttl_ms) is not True:
        raise TypeError("SET's answer is not OK")


def _delete(name: str, client: Any) -> None:
    if not isinstance(client.delete(name), int):
        raise TypeError("DEL's answer is no number")


def _said(value: str) -> str:
    """A wrong value as an error shows it, with a blank before it; "": it looks like nothing that belongs there."""
    return f" {value!r}" if re.fullmatch(r"[A-Za-z0-9._,/+-]{1,24}", value) else ""


def _host_port(text: str, default_port: int, *, told: bool) -> tuple[str, int]:
    """ValueError: what is wrong. told: the port may be shown."""
    if not text or re.fullmatch(":[0-9]*", text):
        raise ValueError("the host is missing")
    matched = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::(.*))?", text)
    if not matched:
        raise ValueError("the host is neither a name nor an IPv6 address in brackets, as [::1]")
    if matched[2] and not re.fullmatch("[A-Za-z0-9._-]+", matched[2]):
        fault = "a blank" if " " in matched[2] else "a character that none has (in a password it is written %-encoded)"
        raise ValueError(f"the name of the host has {fault}")
    port = matched[3]
    if port is not None and (not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536):
        raise ValueError(f"the port{_said(port) if told else ''} is no number from 1 to 65535")
    return matched[1] or matched[2], int(port or default_port)
