"""Strategy `reload`: ranks measure alone, say what won, and all adopt the one table that the leader lists.

The table travels through the store where all ranks reach it, else over the group. No winner becomes a stored entry before the
group has committed it: another rank may have rejected it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from moe_dist.distributed.epoch import spread
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.plan import PlannedCell
from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, decode_entry
from moe_dist.tuning.identity import Environment
from moe_dist.tuning.pass_terms import Decided, PassSettings
from moe_dist.tuning.problem import Cell, Failed, Tactic, digest
from moe_dist.tuning.rounds import Rounds
from moe_dist.tuning.search import Standing

log = logging.getLogger("moe_dist.tuning")


class Apart:
    """environments: of all ranks, this one's first. announce: takes the place and the cell that is about to be measured."""

    def __init__(
        self,
        settings: PassSettings,
        group: RankGroup,
        store: Store,
        rounds: Rounds,
        environments: Sequence[Environment],
        announce: Callable[[int, PlannedCell], None],
    ) -> None:
        self._settings, self._group, self._store, self._rounds = settings, group, store, rounds
        self._environments, self._announce = environments, announce

    def tune(self, to_tune: Sequence[PlannedCell]) -> tuple[list[Decided], dict[Cell, bytes]]:
        """What each cell came to, and the entries of the table that all adopted."""
        listed: dict[int, bytes] = {}

        def list_table(words: list[bytes]) -> bytes:
            """The leader's part: the table, and what all hear at once, the reasons of what failed somewhere."""
            published = [msgpack.unpackb(word, strict_map_key=False) for word in words]
            failed: dict[int, list[list[Any]]] = {}
            for _, failed_there in published:
                for index, rows in failed_there.items():
                    failed.setdefault(index, []).extend(rows)
            listed.update(self._list_table(to_tune, [mine for mine, _ in published], failed))
            packed: bytes = msgpack.packb(failed)
            return packed

        combined = self._group.reduce("reload-published", msgpack.packb(self._measure(to_tune)), list_table)
        failed = msgpack.unpackb(combined, strict_map_key=False)
        entries = {to_tune[index].cell: entry for index, entry in self._adopt(listed).items()}
        decided = [_decided_from(planned, entries.get(planned.cell), failed.get(index, [])) for index, planned in enumerate(to_tune)]
        return decided, entries

    def _measure(self, to_tune: Sequence[PlannedCell]) -> tuple[dict[int, bytes], dict[int, list[list[Any]]]]:
        """This rank's winners, as entries, and what failed here, as [place of the tactic, reason]; both by place of the cell."""
        mine: dict[int, bytes] = {}
        failed: dict[int, list[list[Any]]] = {}
        for index, planned in enumerate(to_tune):
            self._announce(index, planned)
            if (raced := self._rounds.alone(planned)) is None:
                continue
            race, failed_here = raced
            failed[index] = [[planned.tactics.index(tactic), row.reason] for tactic, row in failed_here.items() if isinstance(row, Failed)]
            decided = Decided(planned.cell, planned.default, race.winner(), race.standing(planned.default), ())
            if (entry := decided.entry(self._settings.key(self._environments[0], planned.cell))) is not None:
                mine[index] = entry
        return mine, failed

    def _adopt(self, listed: dict[int, bytes]) -> dict[int, bytes]:
        """The leader's table on every rank: through the store, or over the group where a rank does not find it there."""
        group, store = self._group, self._store
        table = msgpack.packb(listed) if group.is_leader else b""
        path = f"proposals/{digest(self._settings.deployment)}/{digest(table)}"
        held = bool(listed) and group.size > 1 and store.put(path, table)
        adopted, strangers = spread(group, store, path, table, held=held)
        if held:
            store.delete(path)
        if strangers and listed:
            log.warning("store %s is not shared with rank %s: the table is sent over the group", store.url, ", ".join(map(str, strangers)))
        entries: dict[int, bytes] = msgpack.unpackb(adopted, strict_map_key=False)
        return entries

    def _list_table(
        self, to_tune: Sequence[PlannedCell], published: Sequence[dict[int, bytes]], failed: dict[int, list[list[Any]]]
    ) -> dict[int, bytes]:
        """The leader's choice for each cell: what the store holds now, else the first rank's own; never a tactic that failed somewhere."""
        table: dict[int, bytes] = {}
        stored = self._store.get_many([self._settings.key(self._environments[0], planned.cell).path for planned in to_tune])
        for index, planned in enumerate(to_tune):
            bad = {planned.tactics[at] for at, _ in failed.get(index, [])}
            offered = [
                stored.get(self._settings.key(self._environments[0], planned.cell).path),
                *(mine.get(index) for mine in published),
            ]
            for entry in offered:
                if entry is not None and self._fits(entry, planned, bad):
                    table[index] = entry
                    break
        return table

    def _fits(self, value: bytes, planned: PlannedCell, bad: set[Tactic]) -> bool:
        try:
            entry = decode_entry(value)
        except Malformed:
            return False
        return (
            entry.key_digest in {self._settings.key(e, planned.cell).digest for e in self._environments}
            and entry.tactic in planned.tactics
            and entry.tactic not in bad
        )


def _decided_from(planned: PlannedCell, value: bytes | None, failed: Sequence[Sequence[Any]]) -> Decided:
    rejected = [(planned.tactics[at], reason) for at, reason in failed]
    if value is None:
        return Decided(planned.cell, planned.default, None, None, (*planned.rejected, *rejected))
    entry = decode_entry(value)
    default = (
        Standing(entry.default, entry.default_time.median_us, entry.default_time.spread_us, entry.default_time.samples)
        if entry.default_time
        else None
    )
    winner = Standing(entry.tactic, entry.time.median_us, entry.time.spread_us, entry.time.samples)
    return Decided(planned.cell, planned.default, winner, default, (*planned.rejected, *rejected))
