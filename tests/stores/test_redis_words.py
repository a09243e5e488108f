"""What is said of what a server says: what to do about it, and nothing of the login that it may quote."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import urllib.parse

import pytest
from fake_server import fake_server
from redis_server import TlsEnd
from redis_urls import ENCODED, SECRET, warnings_of

from moe_dist.stores.redis import RedisStore

PROTECTED = b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set. " + b"Do this. " * 99


# What releases say that no test can start. The last: only what a server or a proxy says by itself may be quoted of it.
@pytest.mark.parametrize(
    ("reply", "way_out"),
    [
        (b"-ERR Client sent AUTH, but no password is set", "it asks for no login: leave it out of the URL"),  # before 6
        (b"-ERR unknown command `AUTH`, with args beginning with: ", "it asks for no login: leave it out of the URL"),  # a proxy
        (b"-ERR invalid password", "correct user and password in the URL (%-encoded)"),  # before 6
        (b"-NOAUTH Authentication required.", "it asks for a login: redis://USER:PASSWORD@HOST, without USER for the default one"),
        (PROTECTED, "give it a password, or let it take clients of other hosts (bind, protected-mode)"),
        (b"-ERR max number of clients reached", "raise its maxclients, or end clients of it"),
        (
            b"-MISCONF Redis is configured to save RDB snapshots, but " + b"can't. " * 99,
            "give its disk room, or let it go on (stop-writes-on-bgsave-error)",
        ),
        (b"-NOREPLICAS Not enough good replicas to write.", "start its replicas, or ask for fewer (min-replicas-to-write)"),
        (b"-MASTERDOWN Link with MASTER is down", "name the master, or its sentinels by redis+sentinel://"),
    ],
    ids=lambda value: value.split(b" ")[0].decode() if isinstance(value, bytes) else "",
)
def test_the_words_of_an_old_or_odd_server_have_a_way_out(reply, way_out, caplog, no_secret):
    with fake_server(lambda words: reply + b"\r\n") as port:
        store = RedisStore.from_url(f"redis://:{ENCODED}@127.0.0.1:{port}?timeout=1")
        assert not store.put("x/y", b"1")
        assert store.degraded.endswith(f"; {way_out}"), store.degraded
        assert len(store.degraded) < 450
        (warning,) = warnings_of(caplog)
        assert f"127.0.0.1:{port}" in warning.getMessage()


@pytest.mark.parametrize("secret", [SECRET, "long" * 100, "set", "it's \\odd\x1b\n"])
def test_what_a_server_quotes_of_a_login_is_not_said(secret, caplog):
    """Whole, encoded or cut: Redis quotes the first 128 characters of what follows a command that it does not know."""
    quotes = [
        lambda user, password: b"-ERR unknown command 'AUTH', with args beginning with: '" + user + b"' '" + password[:100],
        lambda user, password: b"-ERR wrong login <" + user + b"> <" + password,
        lambda user, password: b"-ERR wrong login " + repr(password.decode())[1:-1].encode(),
        lambda user, password: b"-NOPERM User " + user + b" has no permissions to run the 'set' command",
    ]
    for quote in quotes:
        reply = quote(b"tokenuser", secret.encode()).replace(b"\n", b" ") + b"\r\n"
        with fake_server(lambda words, reply=reply: reply) as port:
            store = RedisStore.from_url(f"redis://tokenuser:{urllib.parse.quote(secret, safe='')}@127.0.0.1:{port}?timeout=1")
            assert not store.put("x/y", b"1")
            told = store.degraded.partition("; let its ACL")[0]
            assert "tokenuser" not in told
            assert secret not in told
            assert "longlong" not in told
            assert store.degraded.isprintable()


@pytest.mark.parametrize("key", ["encrypted", "of another certificate", "no key"])
def test_a_key_that_cannot_be_used_is_told_at_once_and_asks_no_terminal(key, server, tmp_path):
    """OpenSSL asks whoever sits there for the password of an encrypted one, and waits; here nobody would answer."""
    pem = tmp_path / "key.pem"
    make = ["openssl", "genpkey", "-algorithm", "RSA", "-out", str(pem)]
    encrypted = ["-aes-256-cbc", "-pass", "pass:geheim"] if key == "encrypted" else []
    with TlsEnd(server) as tls:
        subprocess.run([*make, *encrypted], check=True, capture_output=True)
        if key == "no key":
            pem.write_text("no key")
        url = f"rediss://localhost:{tls.port}?ca={tls.ca}&cert={tls.ca}&key={pem}&timeout=20"
        # With a terminal of its own, on which it could be asked.
        master, terminal = pty.openpty()
        code = f"from moe_dist.stores.open import open_store; store = open_store({url!r}); store.put('x/y', b'1'); print(store.degraded)"
        done = subprocess.run(
            [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {code}"],
            stdin=terminal, capture_output=True, text=True, start_new_session=True, timeout=50,
        )  # fmt: skip
        os.close(terminal)
        os.close(master)
        assert done.stdout.endswith("; ca, cert and key must be PEM files, the last two of one pair, and the key not encrypted\n"), done
