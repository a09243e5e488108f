"""`autotune`: the one ambient thing. Inside its block `moe_layer` records what it runs; the group's one pass is its end."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from moe_dist.errors import TunerStateError, first_line
from moe_dist.tuning.tuner import Tuner

_CURRENT: contextvars.ContextVar[Tuner | None] = contextvars.ContextVar("moe_dist_tuner", default=None)


def current_tuner() -> Tuner | None:
    """The tuner of the enclosing `autotune` block in this thread; None outside. Worker threads inherit none: pass it to them."""
    return _CURRENT.get()


@contextlib.contextmanager
def autotune(**settings: Any) -> Iterator[Tuner]:
    """Record every `moe_layer` call of the block, then tune them in one pass. The settings are `Tuner`'s.

    Inside the block a call measures nothing and says nothing to other ranks: it runs the default. Leaving the block by an
    exception tunes nothing and tells the group (peers raise RankWithdrawn). The tuner outlives the block and serves its epoch.
    TunerStateError: blocks nest.
    """
    if _CURRENT.get() is not None:
        raise TunerStateError("autotune blocks can't nest: leave the outer one first, or use a Tuner of your own")
    tuner = Tuner(**settings)
    token = _CURRENT.set(tuner)
    try:
        yield tuner
    except BaseException as error:
        tuner.withdraw(f"{type(error).__name__}: {first_line(error)}")
        tuner.close()
        raise
    finally:
        _CURRENT.reset(token)
    try:
        tuner.run_pass()
    finally:
        tuner.group.release()  # the block is over: the next one may tune with these ranks
