"""Strategy `reload`: ranks measure alone, say what won, and all adopt the one table that the leader lists.

A rank says its winners by their places in the plan, and sends an entry only where the leader has none that serves. The table
travels, packed, through the store where all ranks reach it, else over the group. No winner becomes a stored entry before the group
has committed it: another rank may have rejected it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from moe_dist.distributed.epoch import spread
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import PlannedCell
from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, decode_entry
from moe_dist.tuning.identity import Environment, Key
from moe_dist.tuning.pass_terms import BUDGET_ENDED, Decided, PassSettings
from moe_dist.tuning.problem import Cell, Failed, Tactic, digest
from moe_dist.tuning.rounds import Rounds
from moe_dist.tuning.search import Standing

log = logging.getLogger("moe_dist.tuning")


class Apart:
    """environment: this rank's. announce: takes the place and the cell that is about to be measured."""

    def __init__(
        self,
        settings: PassSettings,
        group: RankGroup,
        store: Store,
        rounds: Rounds,
        environment: Environment,
        announce: Callable[[int, PlannedCell], None],
    ) -> None:
        self._settings, self._group, self._store, self._rounds = settings, group, store, rounds
        self._environment, self._announce = environment, announce

    def tune(self, to_tune: Sequence[PlannedCell]) -> tuple[list[Decided], dict[Cell, bytes]]:
        """What each cell came to, and the entries of the table that all adopted."""
        mine, won, failed_here, tried = self._measure(to_tune)
        listed: dict[int, bytes] = {}

        def list_table(words: list[bytes]) -> bytes:
            """The leader's part: what it has of the table, and what all hear at once: the reasons of what failed somewhere, and which
            ranks' winners of which cells it still needs."""
            published = [msgpack.unpackb(word, strict_map_key=False) for word in words]
            failed: dict[int, list[list[Any]]] = {}
            for _, failed_there in published:
                for index, rows in failed_there.items():
                    failed.setdefault(index, []).extend(rows)
            listed.update(self._stored(to_tune, failed))
            wanted: dict[int, list[int]] = {}
            for index in range(len(to_tune)):
                if (
                    index not in listed
                    and (rank := _first_to_win(index, [places for places, _ in published], failed.get(index, []))) is not None
                ):
                    wanted.setdefault(rank, []).append(index)
            listed.update((index, mine[index]) for index in wanted.pop(self._group.rank, []))
            packed: bytes = msgpack.packb([failed, wanted])
            return packed

        failed, wanted = msgpack.unpackb(
            self._group.reduce("reload-published", msgpack.packb([won, failed_here]), list_table), strict_map_key=False
        )
        if wanted:
            asked = {index: mine[index] for index in wanted.get(self._group.rank, [])}
            words = self._group.exchange("reload-entries", msgpack.packb(asked), reads=set(wanted) if self._group.is_leader else ())
            for rank in wanted if self._group.is_leader else ():
                listed.update(msgpack.unpackb(words[rank], strict_map_key=False))
        entries = {to_tune[index].cell: entry for index, entry in self._adopt(listed).items()}
        decided = [
            _decided_from(planned, entries.get(planned.cell), failed.get(index), tried.get(index, frozenset()))
            for index, planned in enumerate(to_tune)
        ]
        return decided, entries

    def _measure(
        self, to_tune: Sequence[PlannedCell]
    ) -> tuple[dict[int, bytes], dict[int, int], dict[int, list[list[Any]]], dict[int, frozenset[Tactic]]]:
        """This rank's winners, as entries and as places of their tactics, what failed here, as [place of the tactic, reason], and what was
        tried here; all by place of the cell."""
        mine: dict[int, bytes] = {}
        won: dict[int, int] = {}
        failed: dict[int, list[list[Any]]] = {}
        tried: dict[int, frozenset[Tactic]] = {}
        for index, planned in enumerate(to_tune):
            self._announce(index, planned)
            if (raced := self._rounds.alone(planned)) is None:
                continue
            race, failed_here = raced
            tried[index] = frozenset(race.tried)
            failed[index] = [[planned.tactics.index(tactic), row.reason] for tactic, row in failed_here.items() if isinstance(row, Failed)]
            decided = Decided(planned.cell, planned.default, race.winner(), race.standing(planned.default), (), tried[index])
            entry = decided.entry(self._settings.key(self._environment, planned.cell))
            if entry is not None and decided.winner is not None:
                mine[index], won[index] = entry, planned.tactics.index(decided.winner.tactic)
        return mine, won, failed, tried

    def _adopt(self, listed: dict[int, bytes]) -> dict[int, bytes]:
        """The leader's table on every rank: through the store, or over the group where a rank does not find it there."""
        group, store = self._group, self._store
        table = pack_table(listed) if group.is_leader else b""
        path = f"proposals/{digest(self._settings.deployment)}/{digest(table)}"
        held = bool(listed) and group.size > 1 and store.put(path, table)
        adopted, strangers = spread(group, store, path, table, held=held)
        if held:
            store.delete(path)
        if strangers and listed:
            log.warning("store %s is not shared with rank %s: the table is sent over the group", store.url, ", ".join(map(str, strangers)))
        entries: dict[int, bytes] = msgpack.unpackb(zlib.decompress(adopted), strict_map_key=False)
        return entries

    def _stored(self, to_tune: Sequence[PlannedCell], failed: dict[int, list[list[Any]]]) -> dict[int, bytes]:
        """What the leader's store holds of the table by now, never a tactic that failed somewhere."""
        keys = [self._settings.key(self._environment, planned.cell) for planned in to_tune]
        stored = self._store.get_many([key.path for key in keys])
        return {
            index: stored[key.path]
            for index, (planned, key) in enumerate(zip(to_tune, keys, strict=True))
            if key.path in stored
            and _fits(stored[key.path], key, planned.tactics, {planned.tactics[at] for at, _ in failed.get(index, [])})
        }


def _fits(value: bytes, key: Key, tactics: Sequence[Tactic], bad: set[Tactic]) -> bool:
    """Whether `value` is an entry of `key` whose tactic is one of `tactics` and none of `bad`."""
    try:
        entry = decode_entry(value, key.digest)
    except Malformed:
        return False
    return entry.tactic in tactics and entry.tactic not in bad


def pack_table(entries: Mapping[int, bytes]) -> bytes:
    """The entries of a table by the places of their cells, small: one entry is much like the next."""
    return zlib.compress(msgpack.packb(entries))


def _first_to_win(index: int, won: Sequence[dict[int, int]], failed: Sequence[Sequence[Any]]) -> int | None:
    """The first rank whose winner of a cell failed nowhere."""
    bad = {at for at, _ in failed}
    return next((rank for rank, places in enumerate(won) if index in places and places[index] not in bad), None)


def _decided_from(planned: PlannedCell, value: bytes | None, failed: Sequence[Sequence[Any]] | None, tried: frozenset[Tactic]) -> Decided:
    """failed: on any rank that measured the cell; None: no rank had the time."""
    rejected = [(planned.tactics[at], reason) for at, reason in failed or ()]
    if value is None:
        if failed is None:
            rejected = [(tactic, BUDGET_ENDED) for tactic in planned.tactics]
        return Decided(planned.cell, planned.default, None, None, (*planned.rejected, *rejected), tried)
    entry = decode_entry(value)
    default = (
        Standing(entry.default, entry.default_time.median_us, entry.default_time.spread_us, entry.default_time.samples)
        if entry.default_time
        else None
    )
    winner = Standing(entry.tactic, entry.time.median_us, entry.time.spread_us, entry.time.samples)
    return Decided(planned.cell, planned.default, winner, default, (*planned.rejected, *rejected), tried)
