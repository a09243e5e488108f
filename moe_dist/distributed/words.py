"""What the ranks of a group say to each other, and what follows from it: pure functions, no rank is talked to.

A step's word goes by its head, a short one as it is and a long one by its digest; a pass ends by one verdict. Whoever holds the
same words concludes the same. `group.py` sends them, the tests' model follows every order of them.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence

import msgpack

from moe_dist.errors import CallsDiffer, GroupError, NothingRunnable, PassAborted, RankLost, RankWithdrawn, SettingsDiffer, TuningError

_INLINE = 256  # a word of more bytes is said by its digest first
_ERRORS: dict[str, type[TuningError]] = {
    kind.__name__: kind for kind in (RankLost, RankWithdrawn, PassAborted, SettingsDiffer, CallsDiffer, NothingRunnable)
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a pass ended, as its one rendezvous key says: `committed` to a digest, or aborted by an error for everyone."""

    committed: str = ""
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: TuningError) -> Verdict:
        return cls(error=type(error).__name__, message=str(error), ranks=error.ranks if isinstance(error, GroupError) else ())

    def to_text(self) -> str:
        """JSON: a compare and set takes text alone, and a rank that is out of memory can still make some: msgpack asks for 256 KiB first."""
        return json.dumps([self.committed, self.error, self.message, self.ranks])

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        committed, error, message, ranks = json.loads(text)
        return cls(committed, error, message, tuple(ranks))

    @property
    def ends_group(self) -> bool:
        """No further pass begins on a group after it."""
        return self.error in ("RankLost", "RankWithdrawn")

    @property
    def exception(self) -> TuningError | None:
        """What every rank of an aborted pass raises."""
        if not self.error:
            return None
        kind = _ERRORS[self.error]
        return kind(self.message, self.ranks) if issubclass(kind, GroupError) else kind(self.message)


def bundle(words: Sequence[bytes]) -> bytes:
    """A step's words as the leader publishes them: each distinct word once, since most ranks say the same, and whose it is."""
    places: dict[bytes, int] = {}
    whose = [places.setdefault(word, len(places)) for word in words]
    packed: bytes = msgpack.packb([list(places), whose if len(places) > 1 else len(whose)])
    return packed


def unbundle(value: bytes) -> list[bytes]:
    distinct, whose = msgpack.unpackb(value)
    return distinct * whose if isinstance(whose, int) else [distinct[place] for place in whose]


def head_of(word: bytes) -> bytes:
    """How a word is said first: a short one as it is, a long one by its digest."""
    if len(word) <= _INLINE:
        return b"=" + word
    return b"#" + hashlib.sha256(word).digest()[:16]


def senders_of(heads: Sequence[bytes]) -> dict[bytes, int]:
    """{head of a long word: the rank that sends its bytes}; empty where all said the same, since then everybody has them."""
    if len(set(heads)) == 1:
        return {}
    senders: dict[bytes, int] = {}
    for rank, head in enumerate(heads):
        if head.startswith(b"#"):
            senders.setdefault(head, rank)
    return senders


def require_one_step(steps: Sequence[str], names: Sequence[int]) -> None:
    """CallsDiffer: ranks have met in different steps; names those that are not where most are."""
    usual, odd = _odd_ones(steps, names)
    if odd:
        raise CallsDiffer(
            "ranks are in different calls: " + ", ".join(f"rank {name} in {step}" for name, step in odd.items())
            + f", the rest in {usual}; all ranks of a group make the same calls in the same order", odd,
        )  # fmt: skip


def require_one_version(versions: Sequence[str], names: Sequence[int]) -> None:
    """SettingsDiffer: ranks run other code, whose words can't be read; names those that differ from the most."""
    usual, odd = _odd_ones(versions, names)
    if odd:
        raise SettingsDiffer(
            "ranks run other versions of moe_dist: " + ", ".join(f"rank {name} {version}" for name, version in odd.items())
            + f", the rest {usual}; install the same on all: mixed_environments allows other GPUs, drivers and libraries, no other code of "
            "ours, which reads what ranks say", odd, ["version"],
        )  # fmt: skip


def _odd_ones(said: Sequence[str], names: Sequence[int]) -> tuple[str, dict[int, str]]:
    """What most ranks say, and by name what the others do; of equally many the first counts, the same on every rank."""
    if len(set(said)) < 2:
        return "", {}
    ((usual, _),) = collections.Counter(said).most_common(1)
    return usual, {name: other for name, other in zip(names, said, strict=True) if other != usual}


def waited_for(spoken: Collection[int], rank: int, size: int) -> list[int]:
    """Who keeps a step from ending, as `rank` sees it: those without a word; once all have spoken, the leader that has not
    published them; for the leader itself then nobody."""
    silent = [other for other in range(size) if other != rank and other not in spoken]
    return silent or [0] * (rank != 0)


def why_not_served(verdict: Verdict, table_digest: str, number: int, name: int) -> TuningError | None:
    """Why rank `name`, which holds a table of this digest at the end of pass `number`, may not serve it; None: it was committed."""
    if verdict.error:
        return verdict.exception
    if verdict.committed != table_digest:
        return PassAborted(f"pass {number} was committed to table {verdict.committed}, but rank {name} holds {table_digest}", [name])
    return None
