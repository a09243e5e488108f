"""Where no launcher serves the rendezvous, rank 0's process does: it has to outlast the groups that it is not in.

Owns the counts by which those ranks say that they go on, and that they have ended. `tune.py` alone uses it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

_POLL_S = 0.1
_SAID_AFTER_S = 5.0


class Hosted:
    """One rank's part.

    store: the rendezvous of all ranks. group: which of the groups this rank is in, 0: rank 0's. groups: how many there are besides;
    ranks: how many are in them. patience: rank 0's with groups that neither go on nor end. to_end: its patience with the last
    ranks, once one of each group has ended.
    """

    def __init__(self, store: Store, rank: int, group: int, *, groups: int, ranks: int, patience: timedelta, to_end: timedelta) -> None:
        self._store = PrefixStore("moe_dist/hosting", store)  # which serves as long as somebody here holds it
        self._rank, self._group, self._groups, self._ranks = rank, group, groups, ranks
        self._patience_s, self._to_end_s = patience.total_seconds(), to_end.total_seconds()

    def go_on(self) -> None:
        """A pass has ended."""
        if self._group:
            with contextlib.suppress(RuntimeError, OSError):  # rank 0 is gone, and nobody counts
                self._store.add("passes", 1)

    def end(self, say: Callable[[str], None], *, wait: bool = True) -> None:
        """This rank needs the rendezvous no more. In rank 0: returns when nobody does, or patience is over, or at once without `wait`."""
        if self._group:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.add("ranks", 1)
                if self._store.add(f"group-{self._group}", 1) == 1:
                    self._store.add("groups", 1)
        if self._rank != 0 or not wait:
            return
        before, since, said = (0, 0, 0), time.monotonic(), False
        while (now := self._counts())[0] < self._ranks:
            if now != before:
                before, since = now, time.monotonic()
            stood_s, left = time.monotonic() - since, self._ranks - now[0]
            patience_s = self._to_end_s if now[1] == self._groups else self._patience_s
            if stood_s > patience_s:
                say(
                    f"other groups: {left} of {self._ranks} ranks have not moved for {patience_s:g} s; this process ends, and the rendezvous with it"
                )
                return
            if stood_s > _SAID_AFTER_S and not said:
                said = True
                say(f"this process serves the rendezvous: it stays for {left} of the {self._ranks} ranks of other groups")
            time.sleep(_POLL_S)

    def _counts(self) -> tuple[int, int, int]:
        """Ranks and groups that have ended, and passes."""
        return self._store.add("ranks", 0), self._store.add("groups", 0), self._store.add("passes", 0)
