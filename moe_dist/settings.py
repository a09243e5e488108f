"""What the process was told by its environment: the only reader of `os.environ` in the tree.

Owns reading and checking variables; knows no default of any config but the serving engine's. cli, bench, serving, the tuner
and the plugins may import it. Of ours it imports errors alone.

Variables: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RUN_ID`,
`TORCHELASTIC_RESTART_COUNT`, `TORCHELASTIC_USE_AGENT_STORE` (as torchrun sets them), `MOE_DIST_STORE` (URL of the store that
the commands and engines use when none is named), `XDG_CACHE_HOME`. For serving engines also `MOE_DIST_TUNE`,
`MOE_DIST_BUDGET_S`, `MOE_DIST_STRATEGY`, `MOE_DIST_POLICY` and `MOE_DIST_UNSERVED`, see `ServingSettings`. One that is set and empty is one that is not set.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from moe_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings:
    """This process's place among the ranks that a launcher started; a group of one where none did. meet_at: host and port; "": alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    meet_at: str = ""

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
    rank, world_size = _integer(environ, "RANK", 0), _integer(environ, "WORLD_SIZE", 1)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world_size > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start the ranks with torchrun"
        )
    if world_size > 1 and not 1 <= _integer(environ, "MASTER_PORT", 0) <= 65535:
        raise ConfigError(f"MASTER_PORT is {environ['MASTER_PORT']}; it must be from 1 to 65535")
    meet_at = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}" if world_size > 1 else ""
    return RankSettings(rank=rank, world_size=world_size, local_rank=_integer(environ, "LOCAL_RANK", rank), meet_at=meet_at)


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
    """The store of a command that names none: `MOE_DIST_STORE`, else (not set, or empty) a folder in the user's cache."""
    if url := environ.get("MOE_DIST_STORE"):
        return url
    cache = environ.get("XDG_CACHE_HOME")
    return str((Path(cache) if cache else Path.home() / ".cache") / "moe_dist")


def plugins_to_load(variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The framework's own `variable` that lists the plugins which it loads, as `moe-dist doctor` shows it; None: it isn't set."""
    return environ.get(variable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """How a serving engine tunes. Each field is an environment variable, and the plugins take the same names from their engine's own config.

    tune (MOE_DIST_TUNE): "tune": measure in warm-up what the store lacks; "replay": serve what the store has, the default for the rest,
        measure nothing; "off": the defaults run.
    store (MOE_DIST_STORE): URL or folder of the stored winners.
    budget (MOE_DIST_BUDGET_S, seconds): how long measuring may take; the plugins cap it below the engine's start-up timeout.
    strategy (MOE_DIST_STRATEGY): "reduce", "shard" or "reload".
    policy (MOE_DIST_POLICY): "mode": each mode by its own clock; "auto": device time, one measurement for both modes.
    unserved (MOE_DIST_UNSERVED): what becomes of a layer that moe_dist does not serve: "error" ends start-up with the reason, "native"
        gives it the engine's own experts, said once in the log.
    """

    tune: str = "tune"
    store: str = dataclasses.field(repr=False)  # may hold a password
    budget: timedelta = timedelta(seconds=120)
    strategy: str = "reduce"
    policy: str = "mode"
    unserved: str = "error"

    def __post_init__(self) -> None:
        for name, allowed in _SERVING_CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"moe_dist's {name} is {value!r} (MOE_DIST_{name.upper()}); choose one of {', '.join(allowed)}")
        if self.budget <= timedelta(0):
            raise ConfigError(
                f"moe_dist's budget is {self.budget.total_seconds():g} s (MOE_DIST_BUDGET_S); it must be above 0; to measure nothing set tune to replay"
            )


_SERVING_CHOICES = {
    "tune": ("tune", "replay", "off"),
    "strategy": ("reduce", "shard", "reload"),
    "policy": ("mode", "auto"),
    "unserved": ("error", "native"),
}


def serving_settings(given: Mapping[str, object] | None = None, environ: Mapping[str, str] = os.environ) -> ServingSettings:
    """The engine's settings: `given` (tune, store, budget_s, strategy, policy, unserved) first, then the environment, then the defaults.

    ConfigError: an unknown name, or a value that is out of range.
    """
    names = (*_SERVING_CHOICES, "store", "budget_s")
    if given is not None and not isinstance(given, Mapping):  # as an engine's JSON may have it
        raise ConfigError(f"moe_dist's settings are {given!r}; they must be a mapping, as {{'tune': 'replay'}}")
    given = dict(given or {})
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"moe_dist has no setting {unknown[0]!r}; known: {', '.join(sorted(names))}")
    if given.get("store") == "":
        raise ConfigError("moe_dist's store is empty; name a folder or URL, or leave it out for MOE_DIST_STORE or the default")
    values = {name: given.get(name, environ.get(f"MOE_DIST_{name.upper()}") or None) for name in names}
    chosen: dict[str, str] = {name: str(values[name]) for name in _SERVING_CHOICES if values[name] is not None}
    budget = timedelta(seconds=_seconds(values["budget_s"])) if values["budget_s"] is not None else ServingSettings.budget
    return ServingSettings(store=str(values["store"] or default_store(environ)), budget=budget, **chosen)


def _seconds(value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"moe_dist's budget is {value!r} (MOE_DIST_BUDGET_S); it must be a number of seconds")
    return seconds
