"""One pass of a group: agree, measure, decide, reserve, commit. Composes plan, rounds, converge and stores, which don't know each other.

A pass has no state that outlives it: the tuner gives it what this rank has and takes the outcome. A group of one runs the
very same steps. Every exchange below is reached by every rank, whatever happened on it: failures travel as words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import msgpack

from moe_dist.distributed import converge, epoch, plan
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena
from moe_dist.distributed.words import bundle, unbundle
from moe_dist.stores.base import Store
from moe_dist.stores.codec import Malformed, decode_entry, encode_entry, encode_epoch
from moe_dist.stores.layered import ReadOnlyStore, found_by_others
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning.adoption import read_committed, reserve_for
from moe_dist.tuning.apart import Apart
from moe_dist.tuning.identity import Environment, Key
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.pass_terms import Decided, Limits, PassOutcome, PassSettings, ProgressEvent
from moe_dist.tuning.problem import Bucket, Cell, CompileAhead, Entry, Epoch, Operation, Problem, Tactic, Winner, pack
from moe_dist.tuning.rounds import Rounds

log = logging.getLogger("moe_dist.tuning")
T = TypeVar("T")


@runtime_checkable
class CompilesAhead(Protocol):
    """An operation whose tactics are compiled at their first run, which can have that done in parallel before."""

    def compile_ahead(self, tactics: Sequence[Tactic], how: CompileAhead) -> int:
        """Compile what `tactics` launch; how many kernels that were."""


class TunePass:
    """Runs once. records: this rank's operations by problem. memory: entries that this process already holds, by store key.

    serving: the epoch in force; arena: the symmetric memory that it was given. ahead: buckets of passes to come, whose candidates are
    compiled along with this pass's. published: what this tuner has published, to which this one's epoch is added;
    None: publish no epoch, a pass that completes it follows. explain: called on the leader before anything is measured.
    """

    def __init__(
        self,
        settings: PassSettings,
        group: RankGroup,
        environment: Environment,
        records: Mapping[Problem, Operation],
        store: Store,
        *,
        serving: Epoch,
        arena: Arena | None,
        memory: dict[str, bytes],
        journal: Journal | None,
        workspace_limit: int | None,
        on_progress: Callable[[ProgressEvent], None],
        adopt: Callable[[PassOutcome], None],
        ahead: Sequence[Bucket] = (),
        published: epoch.Publications | None,
        explain: Callable[[], None],
    ) -> None:
        self._settings, self._group, self._environment, self._records = settings, group, environment, records
        self._store, self._serving, self._memory, self._journal = store, serving, memory, journal
        self._workspace_limit, self._on_progress, self._adopt, self._explain = workspace_limit, on_progress, adopt, explain
        self._arena, self._ahead, self._published = arena, ahead, published
        self._environments = [environment]
        self._started = time.monotonic()
        self._held: dict[bytes, tuple[bytes, Entry]] = {}  # by digest: the entries that this rank could serve from
        self._rounds = Rounds(settings, group, records, journal)

    def run(self) -> PassOutcome:
        """The outcome that the whole group committed, adopted. Any error before that leaves the previous epoch in force on every rank;
        what comes after (publishing, the callback) can fail, but changes no rank's table."""
        group, rounds = self._group, self._rounds
        with group.open_pass("run_pass"):
            try:
                self._on_progress(ProgressEvent("agree"))
                agreed = self._agree()
                to_tune = [cell for cell in agreed.cells if cell.serve is None] if self._settings.measure else []
                if to_tune and group.is_leader:
                    self._explain()
                rounds.lend_arena(to_tune)
                compiled = self._compile_ahead(to_tune)
                decided, entries = self._measure(to_tune)
                outcome = dataclasses.replace(self._conclude(agreed, decided, entries), compiled=compiled)
                if self._may_need_arena(agreed):
                    outcome = dataclasses.replace(outcome, arena=reserve_for(group, outcome.epoch, self._records, self._arena))
                self._on_progress(ProgressEvent("commit", len(to_tune), len(to_tune)))
                group.commit(outcome.epoch.digest)
            finally:
                rounds.return_arena()
        # Peers serve it from now on, so this rank does too, before anything else can fail.
        self._adopt(outcome)
        keyed = self._keyed(outcome.entries)
        self._memory.update(row for rows in keyed.values() for row in rows)
        if group.is_leader and self._settings.measure:
            self._publish(outcome, keyed)
        self._on_progress(ProgressEvent("done", len(to_tune), len(to_tune)))
        return outcome

    # -- agree ----------------------------------------------------------------------------------------------------------

    def _key(self, cell: Cell, environment: Environment | None = None) -> Key:
        return self._settings.key(environment or self._environment, cell)

    def _agree(self) -> plan.Plan:
        names, group = self._group.names, self._group
        offers = _decoded(group.exchange("agree-1", self._offer().to_bytes()), plan.Offer.from_bytes)
        proposal = plan.agree_offers(offers, names, mixed_environments=self._settings.mixed_environments)
        self._environments = list(dict.fromkeys(Environment.from_plain(offer.environment) for offer in offers))
        if lacked := plan.lacked_hits(proposal, offers):
            self._share_hits(lacked)
        answers = _decoded(group.exchange("agree-2", self._answer(proposal).to_bytes()), plan.Answer.from_bytes)
        return plan.agree_plan(proposal, answers, names)

    def _offer(self) -> plan.Offer:
        cells = [
            Cell(problem, mode, bucket) for problem in self._records for mode in self._settings.modes for bucket in self._settings.buckets
        ]
        hits = self._hits(cells)
        self._held = {plan.hit_digest(value): (value, entry) for value, entry in hits.values()}
        offered = {}
        for cell in cells:
            operation = self._records[cell.problem]
            candidates = tuple(dict.fromkeys(operation.candidates(cell.bucket, cell.mode)))
            served = self._serving.number if cell in self._serving.winners else 0
            offered[cell] = plan.CellOffer(
                operation.default(cell.bucket, cell.mode), candidates, plan.hit_digest(hits[cell][0]) if cell in hits else None, served
            )
        return plan.Offer(
            settings=self._settings.agreed(),
            environment=self._environment.to_plain(),
            cells=offered,
            workspace_limit=self._workspace_limit,
            epoch=self._serving.number,
            epoch_digest=self._serving.digest,
        )

    def _share_hits(self, lacked: Mapping[bytes, int]) -> None:
        """Entries whose digests were offered, to the ranks that lack them, from the first that holds each."""
        group, wanted = self._group, {hit: rank for hit, rank in lacked.items() if hit not in self._held}
        mine = [self._held[hit][0] for hit, rank in lacked.items() if rank == group.rank]
        words = group.exchange("hits", plan.pack_hits(mine), reads=set(wanted.values()))
        for rank in set(wanted.values()):
            for value in plan.unpack_hits(words[rank]):
                if (hit := plan.hit_digest(value)) in wanted:
                    with contextlib.suppress(Malformed):  # no rank offers one; what is not held is answered with a reason
                        self._held[hit] = (value, decode_entry(value))

    def _hits(self, cells: Iterable[Cell]) -> dict[Cell, tuple[bytes, Entry]]:
        """Entries of this rank's cells: memory first, then one read of the store. A damaged one is a miss, logged with its reason."""
        paths = {cell: self._key(cell).path for cell in cells}
        stored = self._store.get_many([path for path in paths.values() if path not in self._memory])
        hits = {}
        for cell, path in paths.items():
            value = self._memory.get(path) or stored.get(path)
            if value is None:
                continue
            try:
                hits[cell] = (value, decode_entry(value, self._key(cell).digest))
            except Malformed as error:
                log.warning("%s: the stored entry is a miss: %s", cell, error)
        return hits

    def _answer(self, proposal: plan.Proposal) -> plan.Answer:
        answers: list[plan.CellAnswer | None] = []
        mixed = len(self._environments) > 1
        known = {(entry.key_digest, entry.tactic) for _, entry in self._held.values()} if mixed else set()
        limits = Limits.of(proposal.workspace_limit, self._journal)
        for proposed in proposal.cells:
            operation = self._records.get(proposed.cell.problem)
            if operation is None:
                answers.append(None)
                continue
            self._group.progress()
            keys = {self._key(proposed.cell, environment).digest for environment in self._environments} if mixed else set()
            hits = tuple(self._why_not_hit(operation, proposed, hit, keys, known, limits) for hit in proposed.hits)
            candidates = tuple(limits.why_not(operation, proposed.cell, tactic) for tactic in proposed.candidates)
            answers.append(plan.CellAnswer(hits, candidates))
        return plan.Answer(tuple(answers))

    def _why_not_hit(
        self,
        operation: Operation,
        proposed: plan.ProposedCell,
        hit: bytes,
        keys: Collection[str],
        known: Collection[tuple[str, Tactic]],
        limits: Limits,
    ) -> str | None:
        """keys: of the cell in each environment of a mixed group; known: (key, winner) of all entries that this rank holds."""
        if hit not in self._held:
            return f"entry {hit.hex()[:8]} did not arrive"
        _, entry = self._held[hit]
        own = self._key(proposed.cell).digest
        # What was tuned in a peer's environment counts here only where this one has come to the same winner.
        if entry.key_digest != own and (entry.key_digest not in keys or (own, entry.tactic) not in known):
            return f"it was tuned under another key ({entry.key_digest[:8]})"
        reason = limits.why_not(operation, proposed.cell, entry.tactic)
        if reason is not None:
            log.warning("%s: the stored winner %s is a miss: %s", proposed.cell, entry.tactic, reason)
        return reason

    # -- compile --------------------------------------------------------------------------------------------------------

    def _compile_ahead(self, to_tune: Sequence[plan.PlannedCell]) -> int:
        """What this rank will time of these cells and of those to come, compiled in parallel; says nothing to other ranks."""
        wanted: dict[Problem, dict[Tactic, None]] = {}
        for planned in to_tune:
            wanted.setdefault(planned.cell.problem, {}).update(dict.fromkeys(planned.tactics))
        if to_tune:
            later = [Cell(problem, mode, bucket) for problem in self._records for mode in self._settings.modes for bucket in self._ahead]
            known = self._hits(later)
            for cell in later:
                if cell not in known:
                    own = self._records[cell.problem]
                    wanted.setdefault(cell.problem, {})[own.default(cell.bucket, cell.mode)] = None
                    wanted[cell.problem].update(dict.fromkeys(own.candidates(cell.bucket, cell.mode)))
        budget = self._settings.budget
        how = CompileAhead(
            rank=self._group.rank,
            ranks=self._group.size,
            # Half of what may be spent: what is left compiles at its first run, which the budget ends too.
            deadline=None if budget is None else self._started + budget.total_seconds() / 2,
            progress=self._group.progress,
        )
        compiled = 0
        for problem, tactics in wanted.items():
            operation = self._records.get(problem)
            if isinstance(operation, CompilesAhead):
                self._on_progress(ProgressEvent("compile", 0, len(to_tune)))
                compiled += operation.compile_ahead([tactic for tactic in tactics if not tactic.collective], how)
        return compiled

    # -- measure, decide and publish ------------------------------------------------------------------------------------

    def _measure(self, to_tune: Sequence[plan.PlannedCell]) -> tuple[list[Decided], dict[Cell, bytes]]:
        """By the strategy: what each cell came to, and the entries that are there already."""
        rounds, strategy = self._rounds, self._settings.strategy

        def announce(index: int, planned: plan.PlannedCell) -> None:
            self._on_progress(ProgressEvent("measure", index, len(to_tune), planned.cell))

        def together(cells: Sequence[plan.PlannedCell], measure: Callable[[int, plan.PlannedCell], Decided]) -> list[Decided]:
            decided = []
            for index, planned in enumerate(cells):
                announce(index, planned)
                decided.append(measure(index, planned))
            return decided

        if strategy != "reload":
            return together(to_tune, rounds.reduce if strategy == "reduce" else rounds.shard), {}
        # Who talks to peers can't be tuned apart: such cells are reduced, whatever the strategy.
        talking = [cell for cell in to_tune if any(tactic.collective for tactic in cell.tactics)]
        apart = Apart(self._settings, self._group, self._store, rounds, self._environment, announce)
        decided, entries = apart.tune([cell for cell in to_tune if cell not in talking])
        return decided + together(talking, rounds.reduce), entries

    def _may_need_arena(self, agreed: plan.Plan) -> bool:
        """Whether the epoch to come may hold a collective tactic: from the plan alone, so that all ranks take the step or none."""
        planned = [tactic for cell in agreed.cells for tactic in (cell.default, *cell.tactics)]
        served = [self._held[cell.serve][1].tactic for cell in agreed.cells if cell.serve is not None]
        kept = [winner.tactic for winner in self._serving.winners.values()] if agreed.base is not None else []
        return any(tactic.collective for tactic in (*planned, *served, *kept))

    def _conclude(self, agreed: plan.Plan, decided: Sequence[Decided], entries: dict[Cell, bytes]) -> PassOutcome:
        """The new table: the previous one where all served the same, plus what was served and tuned; its digest must be one."""
        if agreed.base is None:
            log.warning("the ranks served different epochs: only the cells of this pass are kept")
        hits = [cell for cell in agreed.cells if cell.serve is not None]
        settled = [*(planned.cell for planned in hits), *(outcome.cell for outcome in decided)]
        winners = self._serving.outside(settled) if agreed.base is not None else {}
        kept: dict[Cell, bytes] = dict(entries)
        for planned in hits:
            assert planned.serve is not None
            kept[planned.cell], entry = self._held[planned.serve]
            winners[planned.cell] = _winner(entry, "hit")
        for outcome in decided:
            if outcome.winner is None:
                continue
            default_us = outcome.default_standing.median_us if outcome.default_standing else None
            winners[outcome.cell] = Winner(outcome.winner.tactic, outcome.winner.median_us, outcome.default, default_us, "tuned")
            if outcome.cell not in kept and (made := outcome.entry(self._key(outcome.cell))) is not None:
                kept[outcome.cell] = made
        table = Epoch(0, self._settings.deployment, winners)

        def conclude(words: list[bytes]) -> bytes:
            """The leader's part: what all ranks hold, and the number that its store has free."""
            packed: bytes = msgpack.packb([bundle(words), *self._number(table, agreed.served)])
            return packed

        held, number, stored = msgpack.unpackb(self._group.reduce("decide", table.digest.encode(), conclude))
        converge.require_one_digest([word.decode() for word in unbundle(held)], self._group.names, "winner tables")
        return PassOutcome(
            epoch=dataclasses.replace(table, number=number),
            cells=tuple(planned.cell for planned in agreed.cells),
            keys={planned.cell: self._key(planned.cell).digest for planned in agreed.cells},
            untimed={outcome.cell: reason for outcome in decided if (reason := outcome.why_untimed) is not None},
            measured=sum(len(outcome.tried) for outcome in decided),
            hits=len(hits),
            rejected=tuple((outcome.cell, tactic, reason) for outcome in decided for tactic, reason in outcome.rejected),
            entries=kept,
            stored=stored,
        )

    def _number(self, table: Epoch, served: int) -> tuple[int, bool]:
        """What the leader's store says: the number of `table`, and whether it is there already, so that no joiner needs another."""
        deployment, environments = self._settings.deployment, [environment.digest for environment in self._environments]
        there, ours = epoch.published(self._store, deployment), epoch.EpochName.of(table)
        # What a joiner of these environments would look at; of another one it could not be adopted here.
        alike = next((name for name in there if name.cells == ours.cells and name.may_serve(environments)), None)
        if alike is not None and alike.table == ours.table:
            value = self._store.get(alike.key(deployment))
            found = read_committed(value, deployment) if value is not None else None
            if found is not None and found.serves(environments):
                # Where nobody else finds it, it is yet to be published.
                return alike.number, bool(found_by_others(self._store, [alike.key(deployment)]))
        return 1 + max(served, there[0].number if there else 0), False

    def _keyed(self, entries: Mapping[Cell, bytes]) -> dict[Cell, list[tuple[str, bytes]]]:
        """(store key, entry) of each cell for every environment of the group, whichever rank's the entry was tuned under."""
        if len(self._environments) == 1:
            return {cell: [(self._key(cell).path, entry)] for cell, entry in entries.items()}
        keyed = {}
        for cell, value in entries.items():
            entry, keys = decode_entry(value), [self._key(cell, environment) for environment in self._environments]
            keyed[cell] = [(key.path, encode_entry(dataclasses.replace(entry, key=pack(key.canonical())))) for key in keys]
        return keyed

    def _publish(self, outcome: PassOutcome, keyed: Mapping[Cell, Sequence[tuple[str, bytes]]]) -> None:
        """The leader's part after the commit, best effort: entries (one per environment), then the epoch that joiners adopt."""
        held = found_by_others(self._store, [path for rows in keyed.values() for path, _ in rows])
        for cell, rows in keyed.items():
            winner = outcome.epoch.winners.get(cell)
            for path, entry in rows:
                # A hit that only another rank's store or the local layer held is published, too.
                if winner is not None and (winner.source == "tuned" or path not in held):
                    self._store.put(path, entry)
        # One without winners serves nobody.
        if outcome.stored or self._published is None or not outcome.epoch.winners:
            return
        paths = [self._key(cell, environment).path for environment in self._environments for cell in outcome.epoch.winners]
        embedded = {path: value for path in paths if (value := self._memory.get(path)) is not None}
        environments = [environment.digest for environment in self._environments]
        published = epoch.publish(self._store, outcome.epoch, encode_epoch(outcome.epoch, embedded), environments, self._published)
        # Once an outage: each of many passes would say it. From a process's own memory nobody joins anyway, and "read-only" was the user's word.
        if not published and not self._published.lacking and not isinstance(self._store, MemoryStore | ReadOnlyStore):
            words = "epoch %d could not be published to %s: nobody can join until it is, or a later one"
            log.warning(words, outcome.epoch.number, self._store.url)
        self._published.lacking = not published


def _decoded(words: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Equal words are decoded once: thousands of ranks say the same."""
    known = {word: decode(word) for word in dict.fromkeys(words)}
    return [known[word] for word in words]


def _winner(entry: Entry, source: str) -> Winner:
    return Winner(entry.tactic, entry.time.median_us, entry.default, entry.default_time.median_us if entry.default_time else None, source)
