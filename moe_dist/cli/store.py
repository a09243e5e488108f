"""`moe-dist store`: look into a store of winners, and remove from it. Reads and deletes bytes; tunes and adopts nothing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from typing import Any

from moe_dist.cli.checks import may_hold_login, quiet_stores, require_reached, require_there, store_url
from moe_dist.cli.output import counted, note
from moe_dist.config import summarize
from moe_dist.distributed.epoch import EPOCHS
from moe_dist.errors import ConfigError, StoreError
from moe_dist.settings import default_store
from moe_dist.stores.base import KEY, Store
from moe_dist.stores.codec import Malformed, decode_entry, decode_epoch
from moe_dist.stores.open import open_store
from moe_dist.tuning.identity import ENTRIES
from moe_dist.tuning.problem import Bucket, Winner, unpack

HELP = "list, show and remove what a store holds"
FOLDERS = (ENTRIES, EPOCHS)
_PROBLEMS = 3  # of an epoch that its line names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_store(parser, default=None)
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("ls", help="one line a value: key, what it is, winner and default")
    listing.add_argument("prefix", nargs="?", help="only below this key: entries, epochs, or further down")
    show = actions.add_parser("show", help="a value's whole content as JSON")
    show.add_argument("key")
    remove = actions.add_parser(
        "rm", help="remove values; winners are tuned again once neither entries nor epochs hold them: rm entries epochs"
    )
    remove.add_argument("keys", nargs="+", metavar="key", help="a key, or a prefix for everything below it")
    for action in (listing, show, remove):
        _add_store(action, default=argparse.SUPPRESS)  # after the action, too; not given there, it leaves what was given before


def _add_store(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    parser.add_argument("--store", type=store_url, default=default, help="folder or URL (default: $MOE_DIST_STORE, else the user's cache)")


def run(arguments: argparse.Namespace) -> int:
    """StoreError: the store is not there, or can't be reached: what it holds is then not known. ConfigError: a key is a place."""
    given = vars(arguments)
    named = [name for name in (given.get("prefix"), given.get("key"), *given.get("keys", ())) if name]
    for name in named:
        if may_hold_login(name):  # not shown: it may hold a password
            raise ConfigError(f"`store {arguments.action}` was given a URL where a key belongs; did you mean --store?")
        if not KEY.fullmatch(name.rstrip("/")) and (meant := _store_meant([name])):
            raise ConfigError(f"{name!r} is no key{meant}")
    store = open_store(arguments.store or default_store(), upkeep=False)
    try:
        try:
            require_there(store)
        except StoreError as error:
            raise StoreError(f"{error}{_store_meant(named)}") from None
        with quiet_stores():
            return {"ls": _ls, "show": _show, "rm": _rm}[arguments.action](store, arguments)
    finally:
        store.close()


def _store_meant(named: Iterable[str]) -> str:
    """What to add to an error about keys: which of them is a folder here. "": none."""
    folder = next((name for name in named if os.path.isdir(os.path.expanduser(name))), None)
    return f"; {folder!r} is a folder: did you mean --store {folder}?" if folder is not None else ""


def _ls(store: Store, arguments: argparse.Namespace) -> int:
    keys = _at_or_below(store, arguments.prefix) if arguments.prefix else [key for folder in FOLDERS for key in _below(store, folder)]
    values = store.get_many(keys)
    require_reached(store)
    for key in keys:
        print(f"{key}  {_line(key, values[key]) if key in values else '(gone)'}")
    note(f"{counted(len(keys), 'value')} in {store.url}")
    return 0


def _show(store: Store, arguments: argparse.Namespace) -> int:
    value = store.get(arguments.key)
    require_reached(store)
    if value is None:
        raise ConfigError(f"{store.url} holds no {arguments.key!r}; `moe-dist store ls` lists its keys")
    print(json.dumps(_content(arguments.key, value), indent=1))
    return 0


def _rm(store: Store, arguments: argparse.Namespace) -> int:
    removed = []
    try:
        for named in arguments.keys:
            keys = _at_or_below(store, named)
            for key in keys:
                store.delete(key)
                require_reached(store)
            removed.append(f"removed {counted(len(keys), 'value')} at {named}")
    finally:  # not before: somebody who stops reading has not asked for less
        for line in removed:
            print(line)
    return 0


def _at_or_below(store: Store, named: str) -> list[str]:
    """The key `named`, else those below it. ConfigError: there are none."""
    prefix = named.rstrip("/")
    keys = [prefix] if store.get(prefix) is not None else _below(store, prefix)
    if not keys:
        raise ConfigError(f"{store.url} holds nothing at or below {named!r}; `moe-dist store ls` lists its keys{_store_meant([named])}")
    return keys


def _below(store: Store, prefix: str) -> list[str]:
    keys = store.list(prefix)
    require_reached(store)
    return keys


def _line(key: str, value: bytes) -> str:
    try:
        if key.startswith(f"{EPOCHS}/"):
            epoch, entries = decode_epoch(value)
            problems = sorted({_problem(_plain(unpack(packed))) for packed in {cell.problem.packed for cell in epoch.winners}})
            tuned = " | ".join(problems[:_PROBLEMS]) + (f" and {more} more" if (more := len(problems) - _PROBLEMS) > 0 else "")
            counts = f"{counted(len(epoch.winners), 'winner')}, {counted(len(entries), 'entry', 'entries')}"
            return f"epoch {epoch.number} of {epoch.deployment!r}: {counts}{': ' if tuned else ''}{tuned}"
        entry = decode_entry(value)
    except Malformed as error:
        return f"(unreadable: {error})"
    cell = _plain(unpack(entry.key))["cell"]
    default_us = f"{entry.default_time.median_us:.1f} us" if entry.default_time else "fails"
    times = f"{entry.tactic} {entry.time.median_us:.1f} us, default {entry.default} {default_us}"
    return f"{_problem(cell['problem'])}; {cell['mode']} tokens {Bucket(**cell['bucket'])}: {times}"


def _problem(plain: dict[str, Any]) -> str:
    """A problem in a line: a layer's as `tune` heads it, what else there may be by its fields."""
    operation, fields = plain["operation"], plain["fields"] or {}
    try:
        words = summarize(fields) + (", routed" if fields["routed"] else "")
    except (KeyError, TypeError):
        words = ", ".join(f"{name} {value}" for name, value in dict(fields).items() if not isinstance(value, (dict, list)))
    return f"{operation} {words}".rstrip()


def _content(key: str, value: bytes) -> Any:
    try:
        if key.startswith(f"{EPOCHS}/"):
            epoch, entries = decode_epoch(value)
            said = {packed: _problem(_plain(unpack(packed))) for packed in {cell.problem.packed for cell in epoch.winners}}
            winners = [
                {"cell": str(cell), "problem": said[cell.problem.packed], **_winner(winner)} for cell, winner in epoch.winners.items()
            ]
            return {
                "number": epoch.number,
                "deployment": epoch.deployment,
                "digest": epoch.digest,
                "winners": winners,
                "entries": len(entries),
            }
        entry = decode_entry(value)
    except Malformed as error:
        raise ConfigError(f"{key}: {error}; remove it with `moe-dist store rm`") from error
    return {
        "key": _plain(unpack(entry.key)),
        "tactic": str(entry.tactic),
        "median_us": entry.time.median_us,
        "spread_us": entry.time.spread_us,
        "default": str(entry.default),
        "default_us": entry.default_time.median_us if entry.default_time else None,
        "provenance": dict(entry.provenance),
    }


def _winner(winner: Winner) -> dict[str, Any]:
    return {
        "tactic": str(winner.tactic),
        "tactic_us": winner.tactic_us,
        "default": str(winner.default),
        "default_us": winner.default_us,
    }


def _plain(canonical: Any) -> Any:
    """A canonical form as JSON: tuples of (name, value) become objects, and a dataclass loses its name."""
    if isinstance(canonical, tuple):
        if len(canonical) == 2 and isinstance(canonical[0], str) and _is_pairs(canonical[1]):
            return _plain(canonical[1])
        if _is_pairs(canonical):
            return {name: _plain(value) for name, value in canonical}
        return [_plain(item) for item in canonical]
    return canonical


def _is_pairs(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in value)
