"""One process' hold on a rank's place in a group: who holds it, who is refused, and who takes it over. `group.py` alone uses it.

Whoever closes its tuner gives the place up. A process that ends without a word leaves its claim behind on a rendezvous that outlives
it, and the one that is started in its stead takes the place over; what its peers then learn is the group's business.
"""

from __future__ import annotations

import gc
import uuid
import weakref

from moe_dist.distributed.rendezvous import Rendezvous
from moe_dist.errors import TunerStateError
from moe_dist.process import Process

_FREE = "free"  # not deleted: in between look and deletion another process may take the place over
_HERE: weakref.WeakSet[Claim] = weakref.WeakSet()  # of this process


class Claim:
    """key: the place. what: how errors name it. Methods raise RendezvousLost as requests do."""

    def __init__(self, rendezvous: Rendezvous, key: str, what: str) -> None:
        self._rendezvous, self._key, self._what = rendezvous, key, what
        self.process = Process.this()
        self._mine = f"{uuid.uuid4().hex} {self.process.to_text()}"  # two claims of a process differ, too
        self._released = False
        _HERE.add(self)

    def take(self) -> Process | None:
        """Hold the place from now on. The process that it was taken over from; None: it was free.

        TunerStateError: this process (by a group that it has not dropped), or another that is seen to run, holds it. One that can't be seen from here, on another host or
        in another container, is taken for gone: whoever is started last is the one that was meant.
        """
        former = None
        while (held := self._take_if_free()) != self._mine:
            holder = _holder(held)
            if holder == self.process and _is_here(held):
                raise TunerStateError(f"{self._what} has an open tuner already; close that one first")
            if holder != self.process and holder.runs():
                raise TunerStateError(
                    f"{self._what} has an open tuner already, in {holder}, which still runs; end that process first, or start this one as another rank"
                )
            if self._rendezvous.settle(self._key, self._mine, instead_of=held) == self._mine:
                former = holder
        return former

    def _take_if_free(self) -> str:
        """Who holds the place then."""
        held = self._rendezvous.settle(self._key, self._mine)
        return self._rendezvous.settle(self._key, self._mine, instead_of=_FREE) if held == _FREE else held

    def lost_to(self) -> Process | None:
        """The process that has taken the place over since; None: none has."""
        if self._released:
            return None
        held = self._rendezvous.settle(self._key, self._mine, instead_of=self._mine)
        if held == _FREE:  # who had it has closed since
            held = self._take_if_free()
        return _holder(held) if held != self._mine else None

    def release(self) -> None:
        """Free the place for the next claim. Idempotent."""
        if not self._released:
            self._released = True
            self._rendezvous.settle(self._key, _FREE, instead_of=self._mine)


def _is_here(held: str) -> bool:
    """Whether the claim is still somebody's in this process. A tuner that was dropped without being closed is nobody's."""
    if not any(claim._mine == held for claim in _HERE):
        return False
    gc.collect()  # what was dropped may lie in a cycle
    return any(claim._mine == held for claim in _HERE)


def _holder(held: str) -> Process:
    return Process.from_text(held.partition(" ")[2])
