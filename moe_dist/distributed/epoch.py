"""Where committed epochs live in a store, so that a joiner or a replica can adopt one without a step on serving ranks; and how what
one rank's store holds gets to all ranks of its group.

Knows keys and bytes; what an epoch's value says is the codec's business. A value is published only after its pass was committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgpack

from moe_dist.distributed.group import RankGroup
from moe_dist.tuning.problem import Epoch, digest

EPOCHS = "epochs"
SHARED_MEMORY = Path("/dev/shm")  # of a host's processes
_PATIENCE_S = 1.0  # with a rank of this host that reads the store; then this one does so itself
_MAX_BYTES = 64 << 20  # that a store takes as one value: what is longer is no copy of one
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{16})-([0-9a-f]{32})(?:-([0-9a-f]{8}(?:\.[0-9a-f]{8})*))?")
_HEAD = 8  # characters of an environment's digest in a name: enough to not read in vain
_MAX_NAMED = 15  # environments that fit into a key's segment


class ByteStore(Protocol):
    """The part of a store that epochs need."""

    @property
    def url(self) -> str: ...
    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> bool: ...
    def delete(self, key: str) -> None: ...
    def list(self, prefix: str) -> list[str]: ...


def spread(group: RankGroup, store: ByteStore, key: str, value: bytes, *, held: bool) -> tuple[bytes, list[int]]:
    """The leader's `value` on every rank: each looks under `key` in its own store, and who does not find it there gets it from the leader.

    key, value, held: the leader's; held: its store has published the value. Returns the value, and the global ranks that did not find it.
    """
    key, wanted, held = msgpack.unpackb(group.exchange("spread-key", msgpack.packb([key, digest(value), held]))[0])
    with HostCopy(store, key, wanted) as copy:
        seen = value if group.is_leader else copy.read() if held else None
        answers = group.exchange("spread-found", b"yes" if seen is not None else b"")
    strangers = [rank for rank, answer in enumerate(answers) if not answer]
    sent = (
        group.exchange("spread-value", value if group.is_leader else b"", reads=() if seen is not None else (0,))[0] if strangers else b""
    )
    return (sent if seen is None else seen), [group.names[rank] for rank in strangers]


class HostCopy:
    """The value under `key` of a store, whose digest is `wanted`: of the ranks of a host that open the same store one reads it there,
    and leaves it for the others in the host's memory. So one server feeds as many readers as there are hosts.

    Whoever leaves the `with` block removes the copy: by then a group has exchanged who has it. Ranks that don't share the host's memory
    (containers), wait too long for one another, or find there what another user left, a link or anything but a file, read for themselves:
    anybody on the host can tell the name beforehand, and what a stranger made in such a folder can't be removed.
    """

    def __init__(self, store: ByteStore, key: str, wanted: str) -> None:
        self._store, self._key, self._wanted = store, key, wanted
        self._path = SHARED_MEMORY / f"moe_dist-{os.getuid()}-{digest([store.url, key, wanted])}"

    def read(self) -> bytes | None:
        """None: the store has no such value here."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return self._right(self._store.get(self._key))
        try:
            if not _ours(handle) or not _locked(handle):
                return self._right(self._store.get(self._key))
            with contextlib.suppress(OSError):
                nbytes = os.fstat(handle).st_size
                if nbytes <= _MAX_BYTES and (copied := self._right(os.pread(handle, nbytes, 0))) is not None:
                    return copied
            value = self._right(self._store.get(self._key))
            if value is not None:
                with contextlib.suppress(OSError):  # a full memory: a part of it is no copy
                    os.ftruncate(handle, os.pwrite(handle, value, 0))
            return value
        finally:
            os.close(handle)

    def _right(self, value: bytes | None) -> bytes | None:
        return value if value is not None and digest(value) == self._wanted else None

    def __enter__(self) -> HostCopy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _ours(handle: int) -> bool:
    """Whether it is this user's, and has no second name under which it would be written, too. One that lost its name meanwhile still is."""
    status = os.fstat(handle)
    return status.st_uid == os.geteuid() and status.st_nlink <= 1


def _locked(handle: int) -> bool:
    """Whether the lock could be had before patience ended; it ends with its holder, and with `handle`."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)


@dataclasses.dataclass(frozen=True, order=True)
class EpochName:
    """What the key of an epoch says of it. cells: a digest of the cells that it has winners for; table: the epoch's digest;
    environments: the heads of the digests of those that it was tuned in, (): only its value says which.

    So nothing is overwritten: neither by a group of the same deployment that tunes other problems or another ladder, as pipeline
    stages and other jobs do, nor by a replica that tunes the same at the same time. And what another kind of GPU published need not
    be read to be passed over.
    """

    number: int
    cells: str
    table: str
    environments: tuple[str, ...] = ()

    @classmethod
    def of(cls, table: Epoch, environments: Iterable[str] = ()) -> EpochName:
        """environments: digests of those that the epoch was tuned in."""
        problems = {packed: digest(packed) for packed in {cell.problem.packed for cell in table.winners}}
        cells = digest(sorted([problems[cell.problem.packed], cell.mode, cell.bucket.low, cell.bucket.high] for cell in table.winners))[:16]
        heads = sorted({environment[:_HEAD] for environment in environments})
        return cls(table.number, cells, table.digest, tuple(heads) if len(heads) <= _MAX_NAMED else ())

    def may_serve(self, environments: Iterable[str]) -> bool:
        """Whether it may have been tuned in all of `environments` (digests); its value says whether it was."""
        return not self.environments or {environment[:_HEAD] for environment in environments} <= set(self.environments)

    def key(self, deployment: str) -> str:
        named = f"-{'.'.join(self.environments)}" if self.environments else ""
        return f"{folder(deployment)}/{self.number:08d}-{self.cells}-{self.table}{named}"


def folder(deployment: str) -> str:
    return f"{EPOCHS}/{digest(deployment)}"


@dataclasses.dataclass
class Publications:
    """What this rank has published: keys, oldest first. lacking: its last epoch could not be, which was said."""

    keys: list[str] = dataclasses.field(default_factory=list)
    lacking: bool = False


def publish(store: ByteStore, table: Epoch, value: bytes, environments: Iterable[str] = (), own: Publications | None = None) -> bool:
    """Make a committed epoch visible to joiners. False: it could not be published; until it is, nobody can join from here.

    own: what this rank has published before, to which the new one is added. Of those only the last is kept beside it,
    for a joiner that is about to read it: the group has left them all, and a run of many passes would leave as many.
    """
    key = EpochName.of(table, environments).key(table.deployment)
    published = store.put(key, value)
    if published and own is not None:
        while len(own.keys) > 1:
            if (superseded := own.keys.pop(0)) != key:
                store.delete(superseded)
        own.keys.append(key)
    return published


def published(store: ByteStore, deployment: str) -> list[EpochName]:
    """The epochs of `deployment`, readable or not, the newest first."""
    found = (_NAME.fullmatch(key.rpartition("/")[2]) for key in store.list(folder(deployment)))
    names = (EpochName(int(name[1]), name[2], name[3], tuple(name[4].split(".")) if name[4] else ()) for name in found if name)
    return sorted(names, reverse=True)
