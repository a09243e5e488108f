"""Why a store that holds results has none for this environment, in words for people: nothing is decided by them."""

from __future__ import annotations

from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, decode_entry
from moe_dist.tuning.identity import ENTRIES, Environment
from moe_dist.tuning.problem import unpack

_LOOKED_AT = 64  # environments, of which the nearest is told


def environment_of(entry: bytes) -> Environment:
    """The environment that an entry was tuned in. Malformed: these bytes are no entry under a key."""
    try:
        return Environment.from_plain(dict(dict(unpack(decode_entry(entry).key)[1])["environment"][1]))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise Malformed(f"its key names no environment: {error}") from error


def differences(theirs: Environment, ours: Environment) -> str:
    """As in "triton 3.6.0, here 3.9.0"."""
    return "; ".join(f"{name} {there!r}, here {here!r}" for name, (here, there) in ours.differences(theirs).items())


def why_nothing_fits(store: Store, environment: Environment) -> str | None:
    """How the nearest environment that `store` has results of differs; None: it has some for this one, or none at all."""
    folders: dict[str, str] = {}
    for path in store.list(ENTRIES):
        folders.setdefault(path.rpartition("/")[0], path)
    if environment.folder in folders:
        return None
    nearest: Environment | None = None
    for entry in store.get_many(list(folders.values())[:_LOOKED_AT]).values():
        try:
            other = environment_of(entry)
        except Malformed:
            continue
        if nearest is None or len(environment.differences(other)) < len(environment.differences(nearest)):
            nearest = other
    if nearest is None:
        return None
    return (
        f"has results of {len(folders)} other environments and none of this one; the nearest differs: {differences(nearest, environment)}"
    )
