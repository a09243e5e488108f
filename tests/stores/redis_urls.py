"""What the tests of the store on a server share: a password that must never be said, and URLs."""

from __future__ import annotations

import logging
from datetime import timedelta

SECRET = "s3cret/+@!"
ENCODED = "s3cret%2F%2B%40%21"
AT_ONCE = timedelta(0)


def url_of(server, query="timeout=20", login="", db=0):
    return f"redis://{login}127.0.0.1:{server.port}/{db}?{query}"


def warnings_of(caplog):
    return [record for record in caplog.records if record.name == "moe_dist.stores" and record.levelno >= logging.WARNING]
