"""What a rank may be told by its environment, and what is refused."""

from __future__ import annotations

import pytest

from moe_dist.errors import ConfigError
from moe_dist.settings import RankSettings, default_store, rank_settings

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, RankSettings()),  # no launcher: a group of one
        (
            MASTER | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            RankSettings(rank=3, world_size=4, local_rank=1, meet_at="127.0.0.1:1"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankSettings()),  # alone, a rendezvous is not needed
    ],
)
def test_ranks_of_a_launcher(environ: dict[str, str], settings: RankSettings) -> None:
    assert rank_settings(environ) == settings


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x'; it must be an integer"),
        (MASTER | {"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 with WORLD_SIZE 4"),
        (MASTER | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
            "WORLD_SIZE is 2, but MASTER_PORT is not set; start the ranks with torchrun",
        ),
        (MASTER | {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set; start the ranks with torchrun"),
        (MASTER | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'; it must be an integer"),
        *(
            (MASTER | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}, f"MASTER_PORT is {port}; it must be from 1 to 65535")
            for port in ("-1", "0", "65536")
        ),
    ],
)
def test_wrong_ranks_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_settings(environ)


def test_default_store() -> None:
    assert default_store({"MOE_DIST_STORE": "redis://host/0", "XDG_CACHE_HOME": "/c"}) == "redis://host/0"
    assert default_store({"XDG_CACHE_HOME": "/c"}) == "/c/moe_dist"
    assert default_store({"MOE_DIST_STORE": "", "XDG_CACHE_HOME": "/c"}) == "/c/moe_dist"
    assert default_store({}).endswith("/.cache/moe_dist")
