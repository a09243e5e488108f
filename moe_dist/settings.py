"""What the process was told by its environment: the only reader of `os.environ` in the tree.

Owns reading and checking variables; knows no default of any config. cli and bench may import it, and `stores` for its
default folder. Of ours it imports errors alone.

Variables: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT`,
`TORCHELASTIC_USE_AGENT_STORE` (as torchrun sets them), `MOE_DIST_STORE` (URL of the store that the
commands use when none is named), `XDG_CACHE_HOME`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from moe_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings:
    """This process's place among the ranks of a launcher. launched: a launcher started it; else it is a group of one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"RANK is {self.rank} with WORLD_SIZE {self.world_size}; a launcher sets 0 <= RANK < WORLD_SIZE")
        if self.local_rank < 0:
            raise ConfigError(f"LOCAL_RANK is {self.local_rank}; it must be at least 0")


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be an integer") from None


def rank_settings(environ: Mapping[str, str] = os.environ) -> RankSettings:
    """Read what torchrun set; a group of one when it set nothing. ConfigError: a value is no number or out of range."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankSettings()
    rank = _integer(environ, "RANK", 0)
    return RankSettings(
        rank=rank,
        world_size=_integer(environ, "WORLD_SIZE", 1),
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        launched=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The run's id and how often it was restarted: part of every word that ranks exchange. agent: the launcher serves the default store."""

    run: str = ""
    restart: int = 0
    agent: bool = False


def job_settings(environ: Mapping[str, str] = os.environ) -> JobSettings:
    """What torchrun set; ConfigError: the restart count is no number."""
    return JobSettings(
        run=environ.get("TORCHELASTIC_RUN_ID", ""),
        restart=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
    )


def default_store(environ: Mapping[str, str] = os.environ) -> str:
    """The store of a command that names none: `MOE_DIST_STORE`, else a folder in the user's cache."""
    if url := environ.get("MOE_DIST_STORE"):
        return url
    cache = environ.get("XDG_CACHE_HOME")
    return str((Path(cache) if cache else Path.home() / ".cache") / "moe_dist")
