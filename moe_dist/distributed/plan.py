"""What a group agrees to do: pure functions from the ranks' words to a proposal, then a plan. No rank is talked to here.

agree 1: every rank sends an `Offer`; `agree_offers` gives the union of their problems and the digests of the hits they hold.
hits: only where `lacked_hits` says that a rank lacks one; the bytes are sent by the first rank that holds them.
agree 2: every rank sends an `Answer` to that; `agree_plan` gives the plan, the same everywhere: it fixes every later step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgpack

from moe_dist.errors import NothingRunnable, SettingsDiffer
from moe_dist.tuning.problem import Bucket, Cell, Problem, Tactic, canonical, digest

T = TypeVar("T")

MAX_HITS = 4  # of a cell, that are proposed: where each rank holds another, the newest are enough


def hit_digest(entry: bytes) -> bytes:
    """How an offer names the entry that it would serve from."""
    return hashlib.sha256(entry).digest()[:16]


@dataclasses.dataclass(frozen=True)
class CellOffer:
    """One rank's say on a cell. hit: the digest of the entry that it would serve from, and the epoch that it was tuned for."""

    default: Tactic
    candidates: tuple[Tactic, ...]
    hit: bytes | None = None
    hit_epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Offer:
    """Agree 1. settings and environment map names to plain values that must be equal (environments may be allowed to differ).

    epoch, epoch_digest: the table that the rank serves from.
    """

    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    cells: Mapping[Cell, CellOffer]
    workspace_limit: int | None = None
    epoch: int = 0
    epoch_digest: str = ""

    def to_bytes(self) -> bytes:
        """Problems, modes, tactics and lists of candidates are written once each and named by their place."""
        problems, modes, tactics, choices = (dict[Any, int]() for _ in range(4))

        def place(table: dict[Any, int], item: Any) -> int:
            return table.setdefault(item, len(table))

        cells = [
            [
                place(problems, cell.problem), place(modes, cell.mode), cell.bucket.low, cell.bucket.high,
                place(choices, (offer.default, *offer.candidates)), offer.hit, offer.hit_epoch,
            ]
            for cell, offer in self.cells.items()
        ]  # fmt: skip
        listed = [[place(tactics, tactic) for tactic in choice] for choice in choices]
        packed: bytes = msgpack.packb({
            "settings": canonical(self.settings), "environment": canonical(self.environment), "limit": self.workspace_limit,
            "epoch": [self.epoch, self.epoch_digest], "cells": cells,
            "problems": [[problem.operation, problem.fields] for problem in problems], "modes": list(modes),
            "tactics": [tactic.to_plain() for tactic in tactics], "choices": listed,
        })  # fmt: skip
        return packed

    @classmethod
    def from_bytes(cls, value: bytes) -> Offer:
        plain = msgpack.unpackb(value, strict_map_key=True)
        problems = [Problem(operation, canonical(fields)) for operation, fields in plain["problems"]]
        tactics = [Tactic.from_plain(tactic) for tactic in plain["tactics"]]
        choices = [tuple(tactics[at] for at in choice) for choice in plain["choices"]]
        cells = {
            Cell(problems[problem], plain["modes"][mode], Bucket(low, high)): CellOffer(
                choices[choice][0], choices[choice][1:], hit, hit_epoch
            )
            for problem, mode, low, high, choice, hit, hit_epoch in plain["cells"]
        }
        settings, environment = ({name: canonical(item) for name, item in plain[field]} for field in ("settings", "environment"))
        return cls(settings, environment, cells, plain["limit"], *plain["epoch"])


@dataclasses.dataclass(frozen=True)
class ProposedCell:
    """candidates: the union, default first, then by name. hits: digests of distinct entries, the preferred first."""

    cell: Cell
    default: Tactic
    candidates: tuple[Tactic, ...]
    hits: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """base: the digest of the epoch that all serve from, or None where they differ. served: the highest number of an epoch that a rank serves."""

    cells: tuple[ProposedCell, ...]
    workspace_limit: int | None
    base: str | None
    served: int


@dataclasses.dataclass(frozen=True)
class CellAnswer:
    """For each proposed hit and candidate: None (yes) or the reason against it."""

    hits: tuple[str | None, ...]
    candidates: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Agree 2. One `CellAnswer` a proposed cell, in order; None: this rank has no such problem and abstains."""

    cells: tuple[CellAnswer | None, ...]

    def to_bytes(self) -> bytes:
        """Where there is no reason, as mostly, the number of those that it is not against stands for them."""
        packed: bytes = msgpack.packb([None if cell is None else [_brief(cell.hits), _brief(cell.candidates)] for cell in self.cells])
        return packed

    @classmethod
    def from_bytes(cls, value: bytes) -> Answer:
        return cls(tuple(None if cell is None else CellAnswer(*map(_full, cell)) for cell in msgpack.unpackb(value)))


@dataclasses.dataclass(frozen=True)
class PlannedCell:
    """serve: the digest of the entry that all accepted, or None: time `tactics` (default first). ranks: those that have the problem."""

    cell: Cell
    default: Tactic
    serve: bytes | None
    tactics: tuple[Tactic, ...]
    rejected: tuple[tuple[Tactic, str], ...]
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the group does. The number and order of all later steps follow from it alone."""

    cells: tuple[PlannedCell, ...]
    base: str | None
    served: int


def agree_offers(offers: Sequence[Offer], names: Sequence[int], *, mixed_environments: bool = False) -> Proposal:
    """The same proposal on every rank. SettingsDiffer: settings, environments or a cell's default differ; it names ranks and fields."""
    _require_equal("settings", [offer.settings for offer in offers], names)
    if not mixed_environments:
        _require_equal("environments", [offer.environment for offer in offers], names)
    voices = _voices(offers)
    cells = sorted({cell for _, offer in voices for cell in offer.cells}, key=lambda cell: (cell.problem.packed, cell.mode, cell.bucket))
    proposed = []
    for cell in cells:
        said = [(names[rank], offer.cells[cell]) for rank, offer in voices if cell in offer.cells]
        default = said[0][1].default
        for name, offer in said:
            if offer.default != default:
                raise SettingsDiffer(
                    f"{cell}: the default is {default} on rank {said[0][0]} and {offer.default} on rank {name}",
                    [said[0][0], name],
                    ["default"],
                )
        others = {tactic for _, offer in said for tactic in offer.candidates} - {default}
        preferred = sorted({(-offer.hit_epoch, offer.hit) for _, offer in said if offer.hit is not None})
        hits = tuple(itertools.islice(dict.fromkeys(hit for _, hit in preferred), MAX_HITS))
        proposed.append(ProposedCell(cell, default, (default, *sorted(others, key=str)), hits))
    limits = [offer.workspace_limit for offer in offers if offer.workspace_limit is not None]
    bases = {offer.epoch_digest for offer in offers}
    served = max(offer.epoch for offer in offers)
    return Proposal(tuple(proposed), min(limits, default=None), bases.pop() if len(bases) == 1 else None, served)


def lacked_hits(proposal: Proposal, offers: Sequence[Offer]) -> dict[bytes, int]:
    """{digest of a proposed hit that a rank does not hold: the first rank that does}, in the order of the proposal.

    A rank without the problem lacks its hits too: it serves the same table as the others.
    """
    voices = _voices(offers)
    lacked: dict[bytes, int] = {}
    for proposed in proposal.cells if len(voices) > 1 else ():
        held = [(rank, offer.cells[proposed.cell].hit if proposed.cell in offer.cells else None) for rank, offer in voices]
        for hit in proposed.hits:
            holders = [rank for rank, own in held if own == hit]
            if len(holders) < len(held):
                lacked[hit] = holders[0]
    return lacked


def pack_hits(entries: Sequence[bytes]) -> bytes:
    """Entries as one word, small, since one is much like the next: a TCPStore takes no value of more than 8 MiB."""
    return zlib.compress(msgpack.packb(entries), 1)


def unpack_hits(word: bytes) -> list[bytes]:
    entries: list[bytes] = msgpack.unpackb(zlib.decompress(word))
    return entries


def agree_plan(proposal: Proposal, answers: Sequence[Answer], names: Sequence[int]) -> Plan:
    """The same plan on every rank: serve a hit that all accepted, else time what all can run.

    NothingRunnable: a cell has no candidate that all can run, and its default fails somewhere; nothing is stored.
    """
    planned = []
    voices, everyone = _voices(answers), tuple(range(len(answers)))
    for at, proposed in enumerate(proposal.cells):
        said = [(rank, answer.cells[at]) for rank, answer in voices]
        present = [(rank, answer) for rank, answer in said if answer is not None]
        serve = next((hit for index, hit in enumerate(proposed.hits) if all(answer.hits[index] is None for _, answer in present)), None)
        runnable, rejected = [], []
        for index, tactic in enumerate(proposed.candidates):
            reasons = [(names[rank], reason) for rank, answer in present if (reason := answer.candidates[index]) is not None]
            if tactic.collective:
                reasons += [
                    (names[rank], "it has no such problem, and this tactic needs every rank") for rank, answer in said if answer is None
                ]
            if reasons:
                rejected.append((tactic, f"rank {reasons[0][0]}: {reasons[0][1]}"))
            else:
                runnable.append(tactic)
        # A collective default that only lacks a rank that takes part can't be timed, and stays the default.
        served_untuned = proposed.default.collective and all(answer.candidates[0] is None for _, answer in present)
        if serve is None and not runnable and not served_untuned:
            listing = "; ".join(f"{tactic}: {reason}" for tactic, reason in rejected)
            raise NothingRunnable(f"{proposed.cell}: no candidate can run on all ranks: {listing}")
        ranks = everyone if len(present) == len(said) else tuple(rank for rank in everyone if answers[rank].cells[at] is not None)
        planned.append(PlannedCell(proposed.cell, proposed.default, serve, tuple(runnable), tuple(rejected), ranks))
    return Plan(tuple(planned), proposal.base, proposal.served)


def _brief(reasons: tuple[str | None, ...]) -> int | list[str | None]:
    return list(reasons) if any(reasons) else len(reasons)


def _full(brief: int | list[str | None]) -> tuple[str | None, ...]:
    return (None,) * brief if isinstance(brief, int) else tuple(brief)


def _voices(words: Sequence[T]) -> list[tuple[int, T]]:
    """(the first rank that said it, word) for each distinct word object: thousands of ranks say the same, decoded once."""
    firsts: dict[int, tuple[int, T]] = {}
    for rank, word in enumerate(words):
        firsts.setdefault(id(word), (rank, word))
    return list(firsts.values())


def _require_equal(what: str, values: Sequence[Mapping[str, Any]], names: Sequence[int]) -> None:
    voices = [value for _, value in _voices(values)]
    differing = sorted(field for field in set().union(*voices) if len({digest(canonical(value.get(field))) for value in voices}) > 1)
    if not differing:
        return
    lines: list[str] = []
    culprits: set[int] = set()
    for field in differing:
        holders: dict[str, list[int]] = {}
        for name, value in zip(names, values, strict=True):
            holders.setdefault(repr(value.get(field)), []).append(name)
        usual = max(holders.values(), key=len)
        culprits.update(name for held in holders.values() if held is not usual for name in held)
        lines.append(f"{field} is " + " and ".join(f"{text} on rank {', '.join(map(str, held))}" for text, held in holders.items()))
    raise SettingsDiffer(f"{what} differ between ranks: " + "; ".join(lines) + "; start all ranks alike", sorted(culprits), differing)
