"""What a URL of a server says, and what is never said of it: its passwords."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import urllib.parse
from datetime import timedelta

import pytest
from redis_urls import ENCODED, SECRET

from moe_dist.errors import StoreError
from moe_dist.stores.open import open_store
from moe_dist.stores.redis_url import RedisAddress


@pytest.mark.parametrize(
    ("url", "public", "fields"),
    [
        ("redis://host", "redis://host:6379/0", {"hosts": (("host", 6379),)}),
        ("redis://[::1]:7000/3", "redis://[::1]:7000/3", {"hosts": (("::1", 7000),), "db": 3}),
        ("redis://host?db=2&prefix=p&ttl=60&timeout=0.5", "redis://host:6379/2", {"db": 2, "prefix": "p", "ttl": timedelta(minutes=1), "timeout": timedelta(milliseconds=500)}),
        (f"rediss://user:{ENCODED}@host:1/0?ca=/ca.pem&verify=no", "rediss://host:1/0", {"tls": True, "user": "user", "password": SECRET, "ca": "/ca.pem", "verify": False}),
        (f"redis://:{SECRET}@host", "redis://host:6379/0", {"user": None, "password": SECRET}),  # written without %, but for its '/' and '@' it can be told
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1", {"path": "/run/redis.sock", "db": 1}),
        ("redis+sentinel://a,b:1/main/2", "redis+sentinel://a:26379,b:1/.../2", {"kind": "sentinel", "service": "main", "db": 2}),
        ("rediss+sentinel://a/main?sentinel_password=x", "rediss+sentinel://a:26379/.../0", {"sentinel_password": "x", "tls": True}),
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
        ("redis://", "store URL redis://: the host is missing; write redis://[USER:PASSWORD@]HOST:PORT"),
        ("redis://:6379", "store URL redis://...: the host is missing; write redis://["),
        (f"redis://u:{ENCODED}@", "the host is missing; write redis://HOST:PORT"),
        ("redis+cluster://a:1,,b", "the host is missing; write redis+cluster://["),
        ("redis+sentinel:///main", "the host is missing; write redis+sentinel://["),
        ("redis://local host:6391", "store URL redis://...: the name of the host has a blank; write redis://"),
        (f"redis://u:{ENCODED}@a!b", "store URL redis://...: the name of the host has a character that none has (in a password it is written %-encoded)"),
        ("redis://::1:6379", "the host is neither a name nor an IPv6 address in brackets, as [::1]; write redis://"),
        ("redis://[::1", "the host is neither a name nor an IPv6 address in brackets"),
        (f"redis://u:{ENCODED}@host:port/0", "store URL redis://host:.../0: the port is no number from 1 to 65535; write redis://HOST:PORT"),
        (f"redis://u:{ENCODED}@host:99999", "store URL redis://host:...: the port is no number from 1 to 65535"),
        (f"redis://u:{ENCODED}@host:0", "the port is no number from 1 to 65535"),
        (f"redis://user:{ENCODED}", "store URL redis://...: the port is no number from 1 to 65535; write redis://[USER:PASSWORD@]HOST:PORT"),
        ("redis://user:secretive", "store URL redis://...: the port is no number from 1 to 65535; write redis://[USER:PASSWORD@]HOST:PORT"),
        ("redis://host:1,/tmp/b", "store URL redis://host:1,...: it names one server, but has a comma; two stores, the local one first, are layered:LOCAL,SHARED"),
        ("redis://host:1,redis://host:2", "store URL redis://host:1,...: it names one server, but has a comma"),
        (f"redis://u:{ENCODED}@host/zero", "store URL redis://host/...: the database is no number; write /0"),
        ("redis://host/zero", "store URL redis://host/...: the database is no number; write /0"),
        ("redis://host/-1", "the database is no number"),
        ("redis://user:12/hunter", "store URL redis://user:12/...: the database is no number; write /0"),
        ("unix:///tmp/x?db=x", "store URL unix:///tmp/x: the database is no number; write ?db=0"),
        ("unix://", "the path of a socket begins with a '/': unix:///run/redis.sock"),
        ("unix://run/redis.sock", "the path of a socket begins with a '/': unix:///run/redis.sock"),
        (f"redis://u:{ENCODED}@host?ttl=soon", "store URL redis://host: ttl is no number of seconds"),
        (f"redis://u:{ENCODED}@host?ttl={ENCODED}", "host: ttl is no number of seconds"),
        ("redis://host?timeout=1e400", "timeout is no number of seconds"),
        ("redis://host?timeout=2,/tmp/b", "timeout is no number of seconds; two stores, the local one first, are layered:LOCAL,SHARED"),
        (f"redis://u:{ENCODED}@host?verify=maybe", "verify is neither yes nor no"),
        (f"redis://u:{ENCODED}@host?ttl=0.5", "ttl is below a second"),
        (f"redis://u:{ENCODED}@host?timeout=1e9", "timeout is outside 0.01 to 60 seconds"),
        (f"redis://u:{ENCODED}@host?timeout=nan", "timeout is no number of seconds"),
        (f"redis://u:{ENCODED}@host?prefix=a{{b", "the prefix can't be one of keys; use 1 to 64 letters"),
        (f"redis://u:{ENCODED}@host?pasword=x&ttl=9", "store URL redis://host: parameter 1 of the query is unknown; known are prefix, ttl"),
        (f"redis://u:?{SECRET}@host", "must be written %3F"),
        (f"redis+sentinel://u:{ENCODED}@host", "name the service"),
        (f"redis+cluster://u:{ENCODED}@host/1", "a cluster has no databases"),
    ],
)  # fmt: skip
def test_a_wrong_url_is_refused_without_its_password(url, message):
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert message in str(caught.value)
    for secret in (SECRET, ENCODED, "secretive", "hunter"):
        assert secret not in str(caught.value)
        assert secret not in repr(caught.value)


def test_the_rest_of_a_password_without_a_host_is_no_parameter_that_an_error_names():
    with pytest.raises(StoreError, match="parameter 1 of the query is unknown; known are") as caught:
        open_store("redis://u:a?S3cret?timeout=1")
    assert "S3cret" not in str(caught.value)


def test_an_unknown_scheme_lists_the_schemes_without_the_password():
    with pytest.raises(StoreError, match=r"scheme 'reddis:' is unknown; use one of memory:, .*redis\+cluster://") as caught:
        open_store(f"reddis://u:{ENCODED}@host")
    assert ENCODED not in str(caught.value)
    for url in ("s3://bucket/x", "layered:/tmp,s3://bucket/x"):
        with pytest.raises(StoreError, match="scheme 's3:' is unknown; use one of memory:"):
            open_store(url)
    with pytest.raises(StoreError, match=r"scheme '\.\.\.' is unknown"):
        open_store("secret:x")
    with pytest.raises(StoreError, match=r"begins with redis: has two slashes after it: redis://host:6379"):
        open_store("redis:host")


@pytest.mark.parametrize(
    "url",
    [
        "/tmp/a,/tmp/b",
        "./a,redis://host",
        "a,redis://host",
        "memory:,redis://host",
        "file:///tmp/a,/tmp/b",
        "layered:/a,/b,/c",
        "/l,redis://:secret/0",  # a login whose host was forgotten: no "@" tells of it
        "~/l,redis://u:secret:6379",
        "layered:redis://user:12,secret,/tmp",  # the rest of a password whose host was forgotten
        "layered:redis://user:12,/secret,/tmp",
        "/tmp/a,redis://user:secret@host",
    ],
)
def test_a_list_of_stores_without_layered_makes_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        open_store(url)
    way_out = "two stores, the local one first, are layered:LOCAL,SHARED; in the name of a folder write it %2C: file:///tmp/a%2Cb"
    assert str(caught.value) == f"a store's URL has a comma; {way_out}"
    assert open_store("file:///tmp/a%2C/b").url == "file:///tmp/a%2C/b"


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
