"""A group of ranks with deadlines: what it owns is the steps of a pass, liveness and the pass's one verdict.

Ranks talk through a prefix of a torch.distributed Store (`rendezvous.py`), never through the framework's collectives. Every word carries
run, restart, attachment, pass, step and rank, so a late one matches nothing. One rank, 0, gathers a step's words and
publishes them together, or what they come to: 2 messages a rank and step, whatever the size of the group. A long word is said
by its digest, and its bytes follow only where ranks said different ones: what all say alike never travels.
What words are made of is said in `words.py`, who takes part in `member.py`. Knows nothing of plans, tactics or stores of winners;
`converge.py` and the tuner use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgpack
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from moe_dist.distributed.member import VERDICT, Member
from moe_dist.distributed.rendezvous import Rendezvous, store_of
from moe_dist.distributed.words import (
    Verdict,
    bundle,
    head_of,
    require_one_step,
    require_one_version,
    senders_of,
    unbundle,
    waited_for,
    why_not_served,
)
from moe_dist.errors import (
    CallsDiffer,
    ConfigError,
    GroupError,
    NothingRunnable,
    PassAborted,
    RankLost,
    RankWithdrawn,
    RendezvousLost,
    SettingsDiffer,
    TunerStateError,
    TuningError,
    first_line,
)
from moe_dist.tuning.problem import digest
from moe_dist.versions import code_version

PROGRESS_TIMEOUT = timedelta(seconds=60)
CAP = timedelta(minutes=20)
# Polling starts here and slows down, so that ranks that wait take no CPU from ranks that measure.
_POLL_S, _SLOWEST_POLL_S = 0.001, 0.02
_LOOK_AROUND_S = 0.25  # how often a waiting rank looks at the verdict and at who watches
_LOOK_REQUESTS = 2  # that this takes
_REQUESTS_PER_S = 20_000  # of a whole group that waits, a quarter of them looks: one server answers them all
_HEIR_LOOKS = 4  # without a word of the rank that watches, after which another does
_PROGRESS_EVERY_S = 0.2
_CLOSED = "closed"  # instead of a count of progress


@dataclasses.dataclass
class _Watch:
    """Who watches in one wait, as one rank sees it. said: the last word of who does; since: when this rank first read it."""

    key: str
    said: str = ""
    since: float = 0.0
    words: int = 0  # of this rank's own


class RankGroup:
    """The ranks that tune together. Every wait ends: by the words, by a verdict, or by `RankLost` at a deadline.

    store: the rendezvous, any torch.distributed Store that all ranks reach; the group adds its own prefix.
    rank, size: of this group. names: the global rank of each, for errors; default: the group's own.
    scope: equal on all ranks of this group and different from every other group on the same store.
    host: the global rank whose process serves the rendezvous, None: it lives outside the ranks; when it dies with that rank,
        `RendezvousLost` names the rank.
    version: of the code that speaks, None: this one's. Equal on all ranks, also where environments may differ: everyone concludes
        the same from the same words only by the same code. Those of another never read each other's words, and whoever waits for
        one raises `SettingsDiffer`; who waits for one that was started again as another, `RankLost` with both versions.
    progress_timeout: a rank is lost when it neither answers nor progresses for so long. cap: the same for a whole pass.
    """

    # What it waits and asks by; a simulation has its own.
    _clock: Any = time
    _connect = Rendezvous

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        names: Sequence[int] | None = None,
        scope: str = "group",
        host: int | None = None,
        version: str | None = None,
        progress_timeout: timedelta = PROGRESS_TIMEOUT,
        cap: timedelta = CAP,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is outside a group of {size}; ranks go from 0 to {size - 1}")
        if min(progress_timeout, cap) <= timedelta(0):
            raise ConfigError(f"progress_timeout {progress_timeout} and cap {cap} must be above 0")
        self.rank, self.size = rank, size
        self.names = tuple(names) if names is not None else tuple(range(size))
        self._dead: str | None = None
        self._rendezvous = self._connect(store, host)
        self._progress_timeout, self._cap = progress_timeout.total_seconds(), cap.total_seconds()
        self._member = Member(self._rendezvous, scope, rank, self.names, version or code_version())
        self._one_version = size == 1
        self._pass = 0
        self._pass_start = 0.0
        self._step, self._call = 0, ""
        self._progress, self._progress_sent = 0, 0.0
        self._garbage: list[str] = []
        # Ranks that began to wait together don't ask together.
        spread = 0.75 + 0.5 * (rank * 0.618 % 1)
        self._poll_s = max(_POLL_S, size / _REQUESTS_PER_S)  # until the server may have answered each of them once
        self._slowest_poll_s = spread * max(_SLOWEST_POLL_S, size / (0.75 * _REQUESTS_PER_S))
        self._look_s = spread * max(_LOOK_AROUND_S, _LOOK_REQUESTS * size / (0.25 * _REQUESTS_PER_S))
        self._open = False
        self._closed = False
        try:
            self._member.take_place()
        except TuningError:
            self._rendezvous.close()
            raise

    @classmethod
    def alone(cls) -> RankGroup:
        """A group of one: the same pass, with nobody to wait for."""
        return cls(HashStore(), 0, 1)

    @classmethod
    def from_process_group(
        cls,
        group: dist.ProcessGroup,
        *,
        run: str = "",
        restart: int = 0,
        agent: bool = False,
        version: str | None = None,
        progress_timeout: timedelta = PROGRESS_TIMEOUT,
        cap: timedelta = CAP,
    ) -> RankGroup:
        """The ranks of a torch process group, over a prefix of the store that group was made from; its own collectives stay untouched.

        run, restart: the launcher's, part of every word. agent: the launcher serves the default store; else a TCPStore lives in rank 0.
        version: as for the class.
        TunerStateError: this process is not in the group, or the group's store can't be found.
        """
        ranks = dist.get_process_group_ranks(group)
        me = dist.get_rank()
        if me not in ranks:
            raise TunerStateError(f"rank {me} is not in the group of ranks {ranks}; pass the group that this rank belongs to")
        store = store_of(group)
        scope = f"moe_dist/{run}/{restart}/{digest(ranks)[:16]}"
        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        host = 0 if isinstance(base, TCPStore) and not agent else None
        deadlines = {"progress_timeout": progress_timeout, "cap": cap}
        return cls(store, ranks.index(me), len(ranks), names=ranks, scope=scope, host=host, version=version, **deadlines)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def dead(self) -> str | None:
        """Why no pass begins on this group any more, and no collective tactic is served; None: it lives. Whoever concludes it says so here."""
        return "rendezvous lost" if self._rendezvous.lost else self._dead

    @dead.setter
    def dead(self, reason: str) -> None:
        self._dead = reason

    # -- one pass ---------------------------------------------------------------------------------------------------

    def begin_pass(self, call: str = "a pass") -> None:
        """Open the next pass. call: what it is for, equal on all ranks. TunerStateError: one is open, or the group is dead.
        RankLost: another process has become this rank."""
        if self.dead:
            raise TunerStateError(f"this group is dead ({self.dead}); start a new group or restart the process")
        if self._open:
            raise TunerStateError("a pass is already open on this group; two can't run at once")
        if not self._member.attachment and (ended := self._member.replaced()) is not None:
            self._die_of(ended)
        self._count_pass()
        self._step, self._call = 0, call
        self._pass_start = self._clock.monotonic()
        self._open = True

    def _count_pass(self) -> None:
        self._member.attach()
        self._pass += 1

    @contextlib.contextmanager
    def open_pass(self, call: str) -> Iterator[None]:
        """A pass of all ranks: opened here, and ended for everyone however the block ends. It commits inside, or raises."""
        self.begin_pass(call)
        try:
            yield
        except (SettingsDiffer, CallsDiffer, NothingRunnable, PassAborted) as error:  # all ranks conclude it from the same words
            self.conclude(error)
            raise
        except (RankLost, RankWithdrawn, RendezvousLost):  # what the verdict says
            raise
        except BaseException as error:
            self.withdraw(f"{type(error).__name__}: {first_line(error)}")
            raise

    def exchange(self, step: str, word: bytes, *, reads: Collection[int] | None = None) -> list[bytes]:
        """Send `word` and return every rank's, in rank order. All ranks call the same steps in the same order.

        reads: the ranks whose long words this one needs, the others' may come back as b""; None: all.
        Raises what the pass's verdict says (RankWithdrawn, PassAborted, ...), RankLost at a deadline, RendezvousLost; CallsDiffer
        where a peer is in another step.
        """
        if self.size == 1:
            self._next_step()
            return [word]
        own = head_of(word)
        heads = unbundle(self._meet(step, own, bundle))
        known = {own: word} | {head: head[1:] for head in heads if head.startswith(b"=")}
        senders = senders_of(heads)
        if senders.get(own) == self.rank:
            body = self._body(self.rank)
            self._rendezvous.set(body, word)
            self._garbage.append(body)
        wanted = {head: rank for head, rank in senders.items() if head != own and (reads is None or rank in reads)}
        if wanted:
            bodies = [self._body(rank) for rank in wanted.values()]
            self._await(bodies, step, "bytes", lambda: self._unsent(senders.values()), moving=True)
            known |= {head: self._rendezvous.get(self._body(rank)) for head, rank in wanted.items()}
        return [known.get(head, b"") for head in heads]

    def reduce(self, step: str, word: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Send `word`, and return what all ranks' words come to: the leader alone reads them, and publishes `combine` of them.

        For words that differ from rank to rank: with `exchange` each rank would read as many as there are ranks. Raises as that does.
        """
        if self.size == 1:
            self._next_step()
            return combine([word])
        return self._meet(step, word, combine)

    def _next_step(self) -> str:
        self._step += 1
        self.progress(force=True)
        return f"{self._step:06d}"

    def _meet(self, step: str, said: bytes, conclude: Callable[[list[bytes]], bytes]) -> bytes:
        """All ranks say something, and all get what the leader concludes from it."""
        name, place = self._next_step(), f"{self._call}, step {step}"
        own, all_words = self._key(f"{name}/{self.rank}"), self._key(f"{name}/all")
        former, self._garbage = self._garbage, [own, all_words] if self.is_leader else [own]
        self._rendezvous.set(own, msgpack.packb([place, said]))
        if self.is_leader:
            keys = [self._key(f"{name}/{rank}") for rank in range(self.size)]
            self._await(keys, step, "words", lambda: self._silent(name))
            words = [msgpack.unpackb(word) for word in self._rendezvous.get_many(keys)]
            places = [place for place, _ in words]
            differ = len(set(places)) > 1
            met = msgpack.packb([places, b""] if differ else [[], conclude([word for _, word in words])])
            self._rendezvous.set(all_words, met)
        else:
            self._await([all_words], step, "words", lambda: self._silent(name))
            met = self._rendezvous.get(all_words)
        # Whoever holds this step's words knows that all have read the last step's: those can go.
        for key in former:
            self._rendezvous.delete(key)
        met_in, concluded = msgpack.unpackb(met)
        require_one_step(met_in, self.names)
        return bytes(concluded)

    def progress(self, *, force: bool = False) -> None:
        """Show peers that this rank works: after a pass, too, where they may wait for it in the next one already. Cheap; sent at most
        five times a second. Only the working thread calls it."""
        self._progress += 1
        now = self._clock.monotonic()
        if (
            self._member.attachment
            and self.size > 1
            and not self.dead
            and not self._closed
            and (force or now - self._progress_sent >= _PROGRESS_EVERY_S)
        ):
            self._progress_sent = now
            self._rendezvous.set(self._progress_of(self.rank), str(self._progress))

    def commit(self, table_digest: str) -> None:
        """Close the pass on `table_digest`: the leader compares and sets the one key, the others adopt what it says."""
        if self.is_leader:
            verdict = self._decide(Verdict(committed=table_digest))
        else:
            self._await([self._key(VERDICT)], "commit", "commit", lambda: [0], verdict=True)
            verdict = self._read_verdict()
        self._open = False
        error = why_not_served(verdict, table_digest, self._pass, self.names[self.rank])
        if error is not None:
            if verdict.committed:
                self.dead = "committed to another table"
            elif isinstance(error, (RankLost, RankWithdrawn)):
                self.dead = verdict.message
            raise error

    def abort(self, error: GroupError) -> None:
        """End the pass for everyone with `error`, unless it has ended already. Returns; the caller raises its own error."""
        if self._open and not self.dead:
            self._open = False
            with contextlib.suppress(RendezvousLost):
                self._decide(Verdict.of(error))

    def conclude(self, error: TuningError) -> None:
        """End a pass whose error every rank concludes from the same words. Returns, for the caller to raise `error`; raises what
        the verdict says where a peer had lost patience before it could read them."""
        if not self._open:
            return
        self._open = False
        wanted = Verdict.of(error)
        verdict = self._decide(wanted)
        if verdict != wanted:
            self._die_of(verdict)

    def withdraw(self, reason: str) -> None:
        """This rank leaves by an exception of its own: peers in this pass, or in the one about to begin, raise RankWithdrawn."""
        if self.size == 1:
            self._open = False  # nobody to tell, and nobody whose next pass this one could spoil
        if self.dead or self._closed or self.size == 1:
            return
        if not self._open:
            self._count_pass()
        name = self.names[self.rank]
        self._open = True
        self.abort(RankWithdrawn(f"rank {name} left the pass: {reason}", [name]))
        self.dead = f"rank {name} withdrew"

    def release(self) -> None:
        """Give up the claim, so that another may be made on these ranks; this one goes on under its own words. Idempotent."""
        if not self._closed:
            with contextlib.suppress(RendezvousLost):
                self._member.release()

    def close(self) -> None:
        """Release the request thread and the claim on the ranks, and say so: who waits for this rank in a later pass raises
        RankWithdrawn at once. Idempotent. A request stuck in a dead server is not waited for."""
        if not self._closed:
            if self._member.attachment and self.size > 1 and not self.dead:
                with contextlib.suppress(RendezvousLost):
                    self._rendezvous.set(self._progress_of(self.rank), _CLOSED)
            self.release()
            self._closed = True
            self._rendezvous.close()

    # -- below: the rendezvous -------------------------------------------------------------------------------------------

    @property
    def _base(self) -> str:
        return self._member.base

    def _key(self, name: str) -> str:
        return f"{self._base}/{self._pass}/{name}"

    def _await(
        self, keys: list[str], step: str, wait: str, missing: Callable[[], list[int]], *, moving: bool = False, verdict: bool = False
    ) -> None:
        """Until all `keys` are there. wait: for what; in one step, the same on all ranks that are in it. missing: the ranks that are
        waited for. moving: peers may wait for this rank meanwhile, without blame. verdict: what is awaited is the pass's end itself.

        One of the ranks that wait watches for all (`_watches`): it alone asks who is missing and who moves. Else each would ask about each.
        Raises what the verdict says, or decides that ranks are lost.
        """
        seen: dict[int, tuple[bytes, float]] = {}
        watch = _Watch(self._key(f"{self._step:06d}/watch/{wait}"))
        looked = self._clock.monotonic()
        pause = self._poll_s
        while not self._rendezvous.holds(*keys):
            self._clock.sleep(pause)
            pause = min(pause * 1.15, self._slowest_poll_s)
            now = self._clock.monotonic()
            if now - looked < self._look_s:
                continue
            looked = now
            if self._rendezvous.holds(self._key(VERDICT)):
                # A commit follows the last words: they may have come between the two looks.
                if verdict or self._rendezvous.holds(*keys):
                    return
                self._open = False
                self._die_of(self._read_verdict())
            if moving:
                self.progress()
            over_cap = now - self._pass_start > self._cap
            if not self._watches(watch, over_cap=over_cap):
                continue
            self._require_one_version()
            waited = missing()
            counts = self._progress_counts(waited)
            if gone := [rank for rank in waited if counts[rank] == _CLOSED.encode()]:
                self._go_without(gone, step)
                continue
            # Since when each stands still, by this rank's clock: from when it first waited for it. The leader, for one, is
            # waited for only once all have spoken, however long that took.
            now = self._clock.monotonic()
            seen.update({rank: (count, now) for rank, count in counts.items() if rank not in seen or seen[rank][0] != count})
            stale = [rank for rank in waited if now - seen[rank][1] > self._progress_timeout]
            if waited and (stale or over_cap):
                self._lose(stale or waited, step, over_cap=not stale)

    def _watches(self, watch: _Watch, *, over_cap: bool) -> bool:
        """Whether this rank watches for those that wait with it: it goes on, or begins where none does, where the one that did has
        said nothing for a while, or where this rank is over its cap, which for one of them is enough."""
        watch.words += 1
        mine = f"{self.rank} {watch.words}{' over' * over_cap}"
        watched = watch.said.startswith(f"{self.rank} ")
        said = self._rendezvous.settle(watch.key, mine, instead_of=watch.said if watched else "")
        now = self._clock.monotonic()
        if moved := said != watch.said:
            watch.said, watch.since = said, now
        quiet = now - watch.since > max(_HEIR_LOOKS * self._look_s, self._progress_timeout / 8)
        if (not moved or not said.endswith(" over")) if over_cap else quiet:
            watch.said, watch.since = self._rendezvous.settle(watch.key, mine, instead_of=said), now
        if watch.said == mine and not watched:
            self._garbage.append(watch.key)
        return watch.said == mine

    def _require_one_version(self) -> None:
        """SettingsDiffer, the same on all ranks, once all have said their version."""
        if self._one_version or not (versions := self._member.versions()):
            return
        try:
            require_one_version(versions, self.names)
        except SettingsDiffer as error:
            if self._decide(Verdict.of(error)).committed:
                return  # by all who were of one version until then: adopt it
            raise
        self._one_version = True  # and it stays so: who is started again as another ends the attachment

    def _silent(self, name: str) -> list[int]:
        """The ranks that this one waits for in step `name`."""
        words = {self._key(f"{name}/{rank}"): rank for rank in range(self.size) if rank != self.rank}
        silent = {words[key] for key in self._rendezvous.absent(list(words))}
        return waited_for([rank for rank in words.values() if rank not in silent], self.rank, self.size)

    def _body(self, rank: int) -> str:
        """Where the bytes of `rank`'s long word lie, in the current step."""
        return self._key(f"{self._step:06d}/bytes/{rank}")

    def _unsent(self, senders: Iterable[int]) -> list[int]:
        bodies = {self._body(rank): rank for rank in senders}
        return [bodies[key] for key in self._rendezvous.absent(list(bodies))]

    def _progress_of(self, rank: int) -> str:
        """Where `rank` shows that it moves, and in the end that it has closed, in whichever pass it is missed."""
        return f"{self._base}/progress/{rank}"

    def _progress_counts(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """How far each has moved, b"": it has not begun."""
        found = self._rendezvous.found([self._progress_of(rank) for rank in ranks])
        return {rank: found.get(self._progress_of(rank), b"") for rank in ranks}

    def _lose(self, ranks: list[int], step: str, *, over_cap: bool) -> None:
        why = f"the pass outlasted its cap of {self._cap:.0f} s" if over_cap else f"no progress for {self._progress_timeout:.0f} s"
        self._blame(RankLost, ranks, f"lost in pass {self._pass}, step {step}: {why}")

    def _go_without(self, ranks: list[int], step: str) -> None:
        self._blame(
            RankWithdrawn, ranks,
            f"closed its tuner before pass {self._pass} ({self._call}, step {step}); all ranks of a group make the same calls",
        )  # fmt: skip

    def _blame(self, kind: type[GroupError], ranks: list[int], why: str) -> None:
        """End the pass for everyone, unless it was committed in the same moment."""
        names = [self.names[rank] for rank in ranks]
        message = f"rank {', '.join(map(str, names))} {why}"
        verdict = self._decide(Verdict.of(kind(message, names)))
        self._open = False
        if verdict.committed:
            return  # the leader committed in the same moment: adopt it
        self._die_of(verdict)

    def _decide(self, wanted: Verdict) -> Verdict:
        """Compare-and-set the pass's one key from nothing to `wanted`; what it then says is the verdict for everyone."""
        return Verdict.from_text(self._rendezvous.settle(self._key(VERDICT), wanted.to_text()))

    def _read_verdict(self) -> Verdict:
        return Verdict.from_text(self._rendezvous.get(self._key(VERDICT)).decode())

    def _die_of(self, verdict: Verdict) -> None:
        # Nobody met here: why is what ended the attachment that this rank missed, for who gives up and for who comes too late for that.
        nobody_came = self._pass == 1 and verdict.error == "RankLost" and len(verdict.ranks) == self.size - 1
        if self._member.missed is not None and nobody_came:
            verdict = self._member.missed
        if verdict.ends_group:
            self.dead = verdict.message
        if (error := verdict.exception) is not None:
            raise error
        raise PassAborted(f"pass {self._pass} was committed by others while this rank was still in it", [self.names[self.rank]])
