"""A process as a rank of a group: who it is, of which version, and in which attachment to its peers. `group.py` alone uses it.

Owns the rank's claim on its place, where all versions look, and the count of its attachments, where its own version does. Who takes
a place over ends what the former process had begun. Knows how a pass ended by its verdict, no step of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moe_dist.distributed.claim import Claim
from moe_dist.distributed.rendezvous import Rendezvous
from moe_dist.distributed.words import Verdict
from moe_dist.errors import RankLost, SettingsDiffer
from moe_dist.process import Process

VERDICT = "verdict"


class Member:
    """root: where the group's words begin. rank: this process's, among `names`, the global ranks by which errors call each.
    version: of the code that speaks; words of another lie elsewhere, and are never read. Methods raise RendezvousLost as requests do.

    attachment: the running number of what this rank and its peers meet in, from a first pass to the end of a tuner; 0: not counted yet.
    missed: what ended an attachment that this process did not come to.
    """

    def __init__(self, rendezvous: Rendezvous, root: str, rank: int, names: Sequence[int], version: str) -> None:
        self._rendezvous, self._root, self._rank, self._names, self._version = rendezvous, root, rank, tuple(names), version
        # Where every release says what it is, and who is which rank, however its other words are made and wherever they lie.
        self._versions = [f"{root}/version/{other}" for other in range(len(names))]
        self._claim = Claim(rendezvous, f"{root}/claim/{rank}", f"rank {rank} of group {root!r}")
        self.attachment = 0
        self.missed: Verdict | None = None

    @property
    def _scope(self) -> str:
        return f"{self._root}/{self._version}"

    @property
    def base(self) -> str:
        """Where the words of its attachment begin."""
        return f"{self._scope}/{self.attachment}"

    def take_place(self) -> None:
        """Be the rank from now on. TunerStateError: another is (`Claim.take`)."""
        if (former := self._claim.take()) is not None:
            self._end_for(former)
        if len(self._names) > 1:  # only then: whoever is killed before leaves the next one the same to end
            self._rendezvous.set(self._versions[self._rank], self._version)

    def replaced(self) -> Verdict | None:
        """What this process ends with, where another has become its rank since; None: none has."""
        successor = self._claim.lost_to()
        return None if successor is None else self._started_again(self._claim.process, successor)

    def release(self) -> None:
        """Leave the place to the next one. Idempotent."""
        self._claim.release()

    def versions(self) -> list[str]:
        """Of all ranks; none until each has said its own."""
        there = self._rendezvous.holds(*self._versions)
        return [version.decode() for version in self._rendezvous.get_many(self._versions)] if there else []

    def attach(self) -> None:
        """Attachments are counted by their first passes: one that was refused, or closed unused, on one rank moved no counter.

        One that has ended because this rank did not come to it (it was refused then, or is late) is left behind: peers that come
        again count on. Who then waits for them in vain says what they said.
        """
        while not self.attachment:
            self.attachment = self._rendezvous.count(f"{self._scope}/attach/{self._rank}")
            first = f"{self.base}/1/{VERDICT}"
            if self._rendezvous.holds(first):
                ended = Verdict.from_text(self._rendezvous.get(first).decode())
                if ended.error == RankLost.__name__ and self._names[self._rank] in ended.ranks:
                    self.missed, self.attachment = ended, 0
                elif ended.error == SettingsDiffer.__name__ and len(set(self.versions())) == 1:
                    # Concluded when this rank, or another, was of another version. Who goes on there would wait for it in vain.
                    message = "all ranks run the same moe_dist again, after a restart: make a new tuner on all ranks, or restart them all"
                    self._end(self._scope, self.attachment, Verdict.of(RankLost(message, ended.ranks)))
                    self.attachment = 0

    def _end_for(self, former: Process) -> None:
        """End what `former`, the process that was this rank before, had begun with its peers, or would begin next: who waits for it
        learns at once that nobody comes, and so does `former` itself, should it run somewhere."""
        place = self._versions[self._rank]
        version = self._rendezvous.get(place).decode() if self._rendezvous.holds(place) else self._version
        replaced = version if version != self._version else ""
        said, scope = self._started_again(former, self._claim.process, replaced), f"{self._root}/{version}"
        # Where peers speak another version it comes to no next attachment of theirs, either.
        whose = range(len(self._names)) if replaced else [self._rank]
        begun = self._rendezvous.found([f"{scope}/attach/{rank}" for rank in whose])
        for attachment in range(1, 1 + max(map(int, begun.values()), default=0)):
            if self._end(scope, attachment, said) == said:
                self.missed = said  # if its peers don't come to the next attachment, either

    def _end(self, scope: str, attachment: int, said: Verdict) -> Verdict:
        """Let no further pass begin in an attachment; what ended it, `said` or an earlier verdict."""
        for number in itertools.count(1):
            ended = Verdict.from_text(self._rendezvous.settle(f"{scope}/{attachment}/{number}/{VERDICT}", said.to_text()))
            if ended.ends_group:
                return ended
        raise AssertionError

    def _started_again(self, former: Process, successor: Process, replaced: str = "") -> Verdict:
        """What ends an attachment when `successor` has become this rank in the place of `former`. replaced: the version of that, where
        it was another."""
        name = self._names[self._rank]
        message = f"rank {name} was started again, as {successor} in place of {former}"
        if replaced:
            message += f", with moe_dist {self._version} in place of {replaced}: install the same on all ranks, then"
        else:
            message += ":"
        message += " make a new tuner on all ranks, or restart them all"
        if former.runs() is not False:
            message += "; if both processes run, end the one that was not meant to be this rank"
        return Verdict.of(RankLost(message, [name]))
