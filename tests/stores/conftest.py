"""One server for the stores' tests of a worker, emptied before each test that asks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from redis_server import RedisServer
from redis_urls import ENCODED, SECRET

pytest.register_assert_rewrite("moe_dist.stores.contract")


@pytest.fixture(scope="session")
def running_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    with running_server.client() as client:
        client.flushall()
    return running_server


@pytest.fixture
def no_secret(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Everything that is logged or printed, by anybody, at any level; none of it may hold the password."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        assert SECRET not in text
        assert ENCODED not in text
