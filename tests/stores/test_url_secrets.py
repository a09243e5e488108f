"""Wherever in a URL somebody puts a password by mistake, nothing ever says it; what is a host or a database's number is said."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_dist.cli.main import main
from moe_dist.errors import StoreError
from moe_dist.settings import serving_settings
from moe_dist.stores.open import open_store, shown_url
from moe_dist.stores.redis_url import RedisAddress

MARK = "MaRkEr7q"
HERE = "127.0.0.1:1"  # where nobody answers
ODD = "/@,!#?:%&= []{}~.'\"\\é\n1a"
NOT_A_HOST = "".join(set(ODD) - {"@", ","})  # without a host after it, what follows these may be one, and hosts are said


@dataclass(frozen=True)
class Place:
    """Where {s}, the secret, stands. before, after: the characters that it may begin and end with as it is, so that a host which is not the
    secret stays one. says: what is said all the same."""

    url: str
    before: str = ODD
    after: str = ODD
    says: str = ""


PLACES = [
    *(
        Place(f"{scheme}://{login}{HERE}{path}?timeout=0.05", says=HERE)
        for scheme, path in (("redis", "/3"), ("rediss", ""), ("redis+sentinel", "/main/2"), ("redis+cluster", ""), ("rediss+cluster", ""))
        for login in ("user:{s}@", ":{s}@", "{s}@", "{s}:@", "{s}:{s}@")
    ),
    *(Place(f"unix://{login}/nowhere/socket?timeout=0.05&db=2", says="/nowhere/socket") for login in ("user:{s}@", ":{s}@", "{s}@")),
    # a login whose host was forgotten, or whose ':' and '@' were
    *(Place(f"{scheme}://{login}", before=NOT_A_HOST) for scheme in ("redis", "rediss", "unix", "redis+cluster") for login in ("user:{s}", ":{s}")),
    *(Place(f"{scheme}://user:{{s}}/main", before=NOT_A_HOST) for scheme in ("redis+sentinel", "rediss+sentinel")),
    *(Place(f"{scheme}://{HERE}/{{s}}", before=NOT_A_HOST) for scheme in ("redis", "redis+sentinel", "redis+cluster")),
    Place("redis://user/{s}", before=NOT_A_HOST),
    Place("redis://{s}:word", before="", after=""),
    Place(f"redis+sentinel://{HERE}/main/{{s}}", before=NOT_A_HOST),
    Place(f"redis+sentinel://{HERE}/{{s}}/0?timeout=0.05", before=NOT_A_HOST),
    # a port, a fragment, a path
    Place("redis://127.0.0.1:{s}", before=NOT_A_HOST),
    Place("redis://user:word@127.0.0.1:{s}/0", before=NOT_A_HOST),
    Place("redis+cluster://127.0.0.1:1,127.0.0.1:{s}", before=NOT_A_HOST),
    Place(f"redis://{HERE}/0#{{s}}", before=NOT_A_HOST),
    Place(f"redis://{HERE}#{{s}}", before=NOT_A_HOST),
    Place("unix:///nowhere/socket:{s}", before=NOT_A_HOST),
    Place("unix:///nowhere/socket#{s}", before=NOT_A_HOST),
    Place("unix:///nowhere/socket?db={s}"),
    Place("unix:///nowhere/socket?timeout=0.05&ca={s}"),
    # a value or a name of the query
    *(
        Place(f"redis://word@{HERE}/3?timeout=0.05&{name}={{s}}")
        for name in ("prefix", "ttl", "timeout", "db", "verify", "password", "sentinel_password", "sentinel_user", "ca", "cert", "key")
    ),
    Place(f"rediss://{HERE}/3?timeout=0.05&ca={{s}}&cert={{s}}&key={{s}}"),
    Place(f"redis+sentinel://{HERE}/main?timeout=0.05&sentinel_user={{s}}&sentinel_password={{s}}"),
    Place(f"redis://{HERE}/3?{{s}}=1"),
    Place(f"redis://{HERE}/3?{{s}}"),
    Place("redis://user:a?{s}"),
    # stores of stores, and a comma inside the password
    *(Place(f"{outer}redis://user:{{s}}@{HERE}/3?timeout=0.05", says=HERE) for outer in ("read-only:", "layered:local,", "read-only:layered:local,")),
    Place(f"layered:redis://user:{{s}}@{HERE}/3?timeout=0.05,local"),
    Place(f"layered:redis://user:1,{{s}}@{HERE}/3?timeout=0.05,local"),
    Place(f"layered:redis://user:{{s}}@{HERE}/3?timeout=0.05,redis://user:{{s}}@{HERE}/3?timeout=0.05"),
    Place(f"layered:read-only:redis://user:{{s}}@{HERE}?timeout=0.05,memory:"),
    Place("layered:read-only:redis://user:1,{s}@127.0.0.1"),
    Place(f"layered:redis://127.0.0.1:2?timeout=0.05,read-only:redis://user:{{s}}@{HERE}?timeout=0.05", says=HERE),
    Place(f"layered:redis://127.0.0.1:2?timeout=0.05,layered:memory:,redis://user:{{s}}@{HERE}?timeout=0.05", says=HERE),
    Place("layered:local,redis://user:{s}", before=NOT_A_HOST),
    Place("local,redis://user:{s}@127.0.0.1"),
    # no scheme, or another one
    Place("redis//user:{s}@127.0.0.1"),
    Place("redis//user/{s}"),
    Place("//user:{s}@127.0.0.1:6379"),
    Place("//user:{s}"),
    Place("user:{s}@127.0.0.1:6379/0"),
    Place(":{s}@127.0.0.1"),
    Place("{s}:word@127.0.0.1", after="".join(set(ODD) - {"/", ":"})),  # "scheme://"
    Place("redis:/user:{s}@127.0.0.1"),
    Place("redis:user:{s}@127.0.0.1"),
    Place("REDIS://user:{s}@127.0.0.1"),
    Place("http://user:{s}@127.0.0.1"),
    Place("memory:{s}"),
    Place("memory://{s}"),
    Place("file://user:{s}@127.0.0.1/path"),
    Place("file:///user:{s}@127.0.0.1/path"),
    Place("file://[{s}"),
]  # fmt: skip


@st.composite
def secrets(draw: st.DrawFn) -> tuple[Place, str]:
    place = draw(st.sampled_from(PLACES))
    written = draw(st.sampled_from(["as it is", "encoded", "lower", "plus"]))
    if written == "as it is":
        secret = draw(st.text(place.before, max_size=3)) + MARK + draw(st.text(place.after, max_size=3))
    else:
        secret = draw(st.text(ODD, max_size=3)) + MARK + draw(st.text(ODD, max_size=3))
        secret = (urllib.parse.quote_plus if written == "plus" else urllib.parse.quote)(secret, safe="")
        secret = secret.replace("%2F", "%2f").replace("%3A", "%3a") if written == "lower" else secret
    return place, place.url.replace("{s}", secret)


@dataclass
class Heard:
    """Everything that was said."""

    texts: list[str] = field(default_factory=list)

    def error(self, error: BaseException | None) -> None:
        while error is not None:
            self.texts += [str(error), repr(error), str(vars(error))]
            assert error.__cause__ is None or error.__context__ is None or error.__cause__ is error.__context__
            error = error.__cause__ or error.__context__


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Of everybody, at any level."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    root, listener, level = logging.getLogger(), Listener(), logging.getLogger().level
    root.addHandler(listener)
    root.setLevel(logging.DEBUG)
    yield lines
    root.removeHandler(listener)
    root.setLevel(level)


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the attempts


every = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@every
@given(secrets())
@example((Place("redis://user/{s}"), f"redis://user/{MARK}"))
@example((Place("{s}"), f"layered:read-only:redis://user:1,{MARK}@127.0.0.1"))
@example((Place("file://{s}"), f"file://u:{MARK}@h\u2100/x"))  # which Python's own parser quotes as no host
@example((Place("{s}"), f"/tmp/\ud800/u:{MARK}"))
@example((Place("{s}"), f"redis://u\udc80:{MARK}@{HERE}"))  # an argument that is no text
def test_no_store_error_or_log_says_it(in_a_folder, logged, placed):
    place, url = placed
    heard = Heard()
    logged.clear()
    try:
        store = open_store(url)
    except StoreError as error:
        heard.error(error)
    else:
        with contextlib.closing(store):
            assert store.get("x/y") is None
            assert store.put("x/y", b"1") is False or store.degraded is None
            assert store.list("x") == ["x/y"]
            store.delete("x/y")
            heard.texts += [repr(store), str(store), store.url, str(store.degraded), shown_url(url)]
            heard.texts.append(repr(serving_settings({"store": url})))
        assert place.says in store.url, url
    with contextlib.suppress(StoreError):
        address = RedisAddress.parse(url)
        heard.texts += [repr(address), f"{address}", address.public]
    for text in (*heard.texts, *logged):
        assert MARK not in text


@settings(every, max_examples=40)
@given(secrets(), st.sampled_from([["store", "--store", "{url}", "ls"], ["store", "ls", "{url}"], ["store", "rm", "entries", "{url}"],
                                   ["store", "{url}", "ls"], ["{url}"], ["tune", "--{url}"], ["bench", "stores", "--repeats", "{url}", "x"]]))  # fmt: skip
def test_no_command_says_it(in_a_folder, logged, placed, command):
    logged.clear()
    out, err = io.StringIO(), io.StringIO()
    _, url = placed
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([word.replace("{url}", url) for word in command])
    assert code in (0, 1, 2)
    for text in (out.getvalue(), err.getvalue(), *logged):
        assert MARK not in text


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{MARK}@{HERE}/3?timeout=0.05",
        f"redis+sentinel://{HERE}/{MARK}/3?timeout=0.05",
        f"layered:local,redis://{MARK}@{HERE}/3?timeout=0.05",
        f"redis://user/{MARK}",
        f"redis//user:{MARK}@h",
    ],
)
@pytest.mark.parametrize("framework", [[], ["vllm"], ["sglang"]])
def test_no_doctor_says_it(url, framework, in_a_folder, capfd, logged):
    assert main(["doctor", *framework, "--store", url]) in (1, 2)
    printed = capfd.readouterr()
    for text in (printed.out, printed.err, *logged):
        assert MARK not in text
    assert "Traceback" not in printed.err
    assert HERE in printed.out or HERE not in url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"redis://u:{MARK}@there:7/x", "redis://there:7/...: "),
        (f"redis://u:{MARK}@there:7/5?ttl=x", "redis://there:7/5: "),
        (f"redis://u:{MARK}@there:port/5", "redis://there:.../5: "),
        (f"redis+sentinel://u:{MARK}@one,two:7", "redis+sentinel://one,two:7: "),
        (f"redis+cluster://u:{MARK}@one,two:7/3", "redis+cluster://one,two:7/3: "),
        (f"redis+cluster://u:{MARK}@one,two:x,th!ree:6", "redis+cluster://one,two:...,...: "),
        ("redis://[::1]:7/3?ttl=x", "redis://[::1]:7/3: "),
        (f"unix://u:{MARK}@/run/my server.sock?db=x", "unix:///run/my server.sock: "),
    ],
)
def test_hosts_and_the_number_of_a_database_are_said(url, said):
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert f"store URL {said}" in str(caught.value)
    assert MARK not in str(caught.value)


@pytest.mark.parametrize("shared", ["redis://", "read-only:redis://", "layered:memory:,redis://"])
@pytest.mark.parametrize("local", ["redis://127.0.0.1:2", "read-only:redis://127.0.0.1:2", "memory:", "memory"])
def test_a_login_in_a_layer_is_no_comma_inside_a_password(local, shared, in_a_folder):
    assert f"{shared}{HERE}/0" in open_store(f"layered:{local},{shared}user:{MARK}@{HERE}").url
