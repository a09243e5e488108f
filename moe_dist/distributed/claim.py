"""One process' hold on a rank's place in a group: who holds it, who is refused, and who takes it over. `group.py` alone uses it.

Whoever closes its tuner gives the place up. A process that ends without a word leaves its claim behind on a rendezvous that outlives
it, and the one that is started in its stead takes the place over; what its peers then learn is the group's business.
"""

from __future__ import annotations

import uuid

from moe_dist.distributed.rendezvous import Rendezvous
from moe_dist.errors import TunerStateError
from moe_dist.process import Process


class Claim:
    """key: the place. what: how errors name it. Methods raise RendezvousLost as requests do."""

    def __init__(self, rendezvous: Rendezvous, key: str, what: str) -> None:
        self._rendezvous, self._key, self._what = rendezvous, key, what
        self.process = Process.this()
        self._mine = f"{uuid.uuid4().hex} {self.process.to_text()}"  # two claims of a process differ, too
        self._released = False

    def take(self) -> Process | None:
        """Hold the place from now on. The process that it was taken over from; None: it was free.

        TunerStateError: this process, or another that is seen to run, holds it. One that can't be seen from here, on another host or
        in another container, is taken for gone: whoever is started last is the one that was meant.
        """
        former = None
        while (held := self._rendezvous.settle(self._key, self._mine)) != self._mine:
            holder = _holder(held)
            if holder == self.process:
                raise TunerStateError(f"{self._what} has an open tuner already; close that one first")
            if holder.runs():
                raise TunerStateError(
                    f"{self._what} has an open tuner already, in {holder}, which still runs; end that process first, or start this one as another rank"
                )
            if self._rendezvous.settle(self._key, self._mine, instead_of=held) == self._mine:
                former = holder
        return former

    def lost_to(self) -> Process | None:
        """The process that has taken the place over since; None: none has."""
        if self._released:
            return None
        held = self._rendezvous.settle(self._key, self._mine, instead_of=self._mine)
        return _holder(held) if held != self._mine else None

    def release(self) -> None:
        """Free the place for the next claim. Idempotent."""
        if not self._released:
            self._released = True
            if self._rendezvous.holds(self._key) and self._rendezvous.get(self._key).decode() == self._mine:
                self._rendezvous.delete(self._key)


def _holder(held: str) -> Process:
    return Process.from_text(held.partition(" ")[2])
