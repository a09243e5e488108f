"""What the URL of a server says (Redis, Valkey and the like), and what may be said of it.

    redis://[user:password@]host[:port][/db]            rediss:// the same over TLS
    unix://[user:password@]/path/to/socket[?db=0]
    redis+sentinel://[user:password@]host[:port],host[:port].../service[/db]
    redis+cluster://[user:password@]host[:port],host[:port]...       rediss+sentinel:// and rediss+cluster:// over TLS

Query parameters: `prefix` of the keys ("moe_dist"), `ttl` in seconds (none), `timeout` in seconds of a connect, a read or a
write (2), `db`, `ca` (a file of certificates to trust), `cert` and `key` (files of our own), `verify` (yes, no),
`sentinel_user` and `sentinel_password`.

Owns the words and the client that they ask for; `redis.py` is the store over it. A password that was put in a wrong place looks like
what belongs there, so of a URL only this is ever shown: hosts with their ports, the number of a database, the path of a socket, and the
prefix where an access list must have it. What else stands there (a user, a service, a value, a path that is no number) is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import urllib.parse
from datetime import timedelta
from typing import Any

from moe_dist.errors import StoreError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
PARAMETERS = ("prefix", "ttl", "timeout", "db", "ca", "cert", "key", "verify", "sentinel_user", "sentinel_password")
TWO_STORES = "two stores, the local one first, are layered:LOCAL,SHARED"
SENT = ("mget", "set", "del", "scan")  # what a store sends; redis-py sends more, of which it does without some
HIDDEN = "..."  # what a URL has that is not shown
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # nothing that SCAN's patterns or a hash tag would take for its own
_PORTS = {"sentinel": 26379}
_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RedisAddress:
    """What a URL says. hosts: one for a plain server, seeds for Sentinel and Cluster, none for a socket `path`."""

    kind: str  # "", "sentinel" or "cluster"
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    service: str = ""
    db: int = 0
    user: str | None = None
    password: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = None
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
        if scheme not in SCHEMES:
            raise StoreError(f"the scheme of the store's URL is none of {', '.join(f'{name}://' for name in SCHEMES)}")
        if re.search("[\ud800-\udfff]", url):  # half characters, as which Python reads an argument that is no text
            raise StoreError(f"store URL {scheme}://{HIDDEN}: it has a byte that is no text; write it %-encoded, as UTF-8")
        where, _, query = rest.partition("?")
        login, _, place = where.rpartition("@")

        def wrong(what: str) -> StoreError:
            return StoreError(f"store URL {scheme}://{_shown(scheme, place, told=bool(login))}: {what}")

        if "@" in query:
            raise StoreError(f"store URL {scheme}://{HIDDEN}: a '?' inside a user or password must be written %3F")
        base, _, kind = scheme.partition("+")
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
        for at, (name, _) in enumerate(pairs, 1):
            if name not in PARAMETERS:  # which may be the end of a password with a '?'
                raise wrong(f"parameter {at} of the query is unknown; known are {', '.join(PARAMETERS)}")
        given = dict(pairs)
        user, _, password = (urllib.parse.unquote(word) for word in login.partition(":"))
        hosts, _, path = place.partition("/")
        if base == "unix" and (hosts or not path):
            raise wrong("the path of a socket begins with a '/': unix:///run/redis.sock")
        if not kind and base != "unix" and "," in place:
            raise wrong(f"it names one server, but has a comma; {TWO_STORES}, several hosts redis+cluster:// or redis+sentinel://")
        service, _, db = path.partition("/") if kind == "sentinel" else ("", "", path)
        if kind == "sentinel" and not service:
            raise wrong("name the service that the sentinels watch: redis+sentinel://host:26379/service/db")
        try:
            seeds = [] if base == "unix" else [_host_port(host, _PORTS.get(kind, 6379)) for host in hosts.split(",")]
        except ValueError as error:
            # Without a login it may be one.
            raise wrong(f"{error}; write {scheme}://{'' if login else '[USER:PASSWORD@]'}HOST:PORT") from None
        database = given.get("db") or ("0" if base == "unix" else db) or "0"
        if not re.fullmatch("[0-9]{1,9}", database):
            raise wrong(f"the database is no number; write {'?db=0' if base == 'unix' else '/0'}")

        def seconds(name: str) -> timedelta | None:
            if name not in given:
                return None
            with contextlib.suppress(ValueError, OverflowError):
                return timedelta(seconds=float(given[name]))
            way_out = f"; {TWO_STORES}" if "," in given[name] else ""
            raise wrong(f"{name} is no number of seconds{way_out}")

        ttl, timeout = seconds("ttl"), seconds("timeout")
        if given.get("verify", "yes") not in ("yes", "no"):
            raise wrong("verify is neither yes nor no")
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
            raise wrong("the prefix can't be one of keys; use 1 to 64 letters, digits, '.', '_', ':' or '-'")
        if address.ttl is not None and address.ttl < timedelta(seconds=1):
            raise wrong("ttl is below a second")
        if not timedelta(milliseconds=10) <= address.timeout <= timedelta(seconds=60):
            raise wrong("timeout is outside 0.01 to 60 seconds")
        return address

    @property
    def public(self) -> str:
        """The URL with what may be shown of it."""
        scheme = ("rediss" if self.tls else "redis") + (f"+{self.kind}" if self.kind else "")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        if self.path is not None:
            return f"unix://{_shown_path(self.path)}?db={self.db}"
        return f"{scheme}://{hosts}" + (f"/{HIDDEN}" if self.service else "") + ("" if self.kind == "cluster" else f"/{self.db}")

    def __repr__(self) -> str:
        return f"RedisAddress({self.public!r})"

    @property
    def needs(self) -> tuple[str, ...]:
        """The commands that the server's ACL must allow."""
        select = ("select",) if self.db else ()
        cluster = ("cluster|slots", "command", "asking") if self.kind == "cluster" else ()  # the last in the middle of a slot's move
        return (*SENT, *select, *cluster)

    def secrets(self) -> list[str]:
        rest = (self.path or "").removeprefix(_shown_path(self.path or "").removesuffix(HIDDEN))
        return [secret for secret in (self.password, self.sentinel_password, rest) if secret]

    def names(self) -> list[str]:
        """What a message of a server may quote, and is not shown either; a server has the user "default" by itself."""
        return [name for name in (self.user, self.sentinel_user, self.service) if name and name != "default"]

    def connect(self) -> Any:
        """A redis-py client that retries nothing by itself (the store does). ImportError: redis-py is missing."""
        import redis
        import redis.backoff
        import redis.retry

        from moe_dist.stores.seeds import Sentinels, connect_cluster, connect_if_wanted

        seconds = self.timeout.total_seconds()
        # Said, not left to redis-py, whose releases differ in whether a trusted certificate must be of the host that was asked.
        checks = {"ssl_cert_reqs": "required" if self.verify else "none", "ssl_check_hostname": self.verify}
        # An empty password: of a key that is encrypted a terminal would be asked for one, behind the caller's back.
        files = {"ssl_ca_certs": self.ca, "ssl_certfile": self.cert, "ssl_keyfile": self.key, "ssl_password": ""}
        tls = {"ssl": True, **files, **checks}
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


def _shown(scheme: str, place: str, *, told: bool) -> str:
    """What may be shown of `place`, where a URL that is wrong has its hosts. told: it follows a login; else it may be one whose host was
    forgotten, and what is no host with its port hides the rest, too."""
    if scheme == "unix":
        return _shown_path(place)
    hosts, _, path = place.partition("/")
    items = hosts.split(",")
    kept = []
    for item in items if "+" in scheme else items[:1]:
        try:
            _host_port(item, 1)
            kept.append(item)
        except ValueError:
            if not told:
                return HIDDEN if place else ""
            name = re.match(rf"(?:{_HOST})(?=:)", item)
            kept.append(f"{name[0]}:{HIDDEN}" if name else HIDDEN)
    if len(kept) < len(items):
        kept.append(HIDDEN)
        path = ""
    return ",".join(kept) + (f"/{path}" if re.fullmatch("[0-9]+", path) else f"/{HIDDEN}" if path else "")


def _shown_path(path: str) -> str:
    """What may be shown of the path of a socket: up to what may be the end of a login."""
    return path if re.fullmatch(r"/[\w./ +~=-]*", path) else re.match(r"(?:/[\w./ +~=-]*)?", path)[0] + HIDDEN if path else ""  # type: ignore[index]


def _host_port(text: str, default_port: int) -> tuple[str, int]:
    """ValueError: what is wrong."""
    if not text or re.fullmatch(":[0-9]*", text):
        raise ValueError("the host is missing")
    matched = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::(.*))?", text)
    if not matched:
        raise ValueError("the host is neither a name nor an IPv6 address in brackets, as [::1]")
    if not re.match(rf"(?:{_HOST})(?::|$)", text):
        fault = "a blank" if " " in matched[2] else "a character that none has (in a password it is written %-encoded)"
        raise ValueError(f"the name of the host has {fault}")
    port = matched[3]
    if port is not None and (not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536):
        raise ValueError("the port is no number from 1 to 65535")
    return matched[1] or matched[2], int(port or default_port)
