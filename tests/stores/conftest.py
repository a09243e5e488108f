"""One server for the stores' tests of a worker, emptied before each test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer

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
