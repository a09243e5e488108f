"""A store in a directory, local or shared (NFS and the like): one small file a value.

The value of key a/b/c is ROOT/a/b/c+value; the suffix has a character that no key has, so a file never stands where another
key needs a folder. A value is written to a temporary file beside it, synced, and renamed. A writer holds a lock on its
temporary file, so a killed one's is told from a live one's, and is removed when a store that may write is next attached. Only to
this kernel's own writers does a lock prove that: on a mount that locks within each host alone (Lustre's localflock, NFS's
local_lock) a live writer elsewhere seems to hold none. Its file names another mount, and goes once it is five minutes older than one
written now: a writer that lives, and stalled for so long, finds it gone and writes again. No sooner, not even a file of this host from
before its last start: a machine id, an address and a name may be another's as well (clones and containers of one image have the same), so
nothing tells that host's files from those of one that runs. Files that are not ours are never touched. The kernel bounds disk waits, we
can't: a hard NFS mount whose server is gone blocks as it blocks everyone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from moe_dist.errors import StoreError
from moe_dist.process import boot_id
from moe_dist.stores.base import MAX_VALUE_BYTES, SEGMENT
from moe_dist.stores.degrade import DegradingStore, Unavailable

SUFFIX = "+value"
TEMPORARY = ".moe-dist-tmp-"
_ATTEMPTS = 3  # how often a folder or a temporary file may vanish under one write
_RETRY_AFTER = timedelta(seconds=30)  # until a disk that was full is asked again to take what was kept; a `put` always asks it
_DEAD_AGE_S = 300.0  # where a lock proves nothing, a temporary file this old has no live writer, or one that will write it again
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NOT_OURS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ELOOP}  # no file, or no file of ours: a plain miss


class FilesystemStore(DegradingStore):
    """path: the directory; made at the first `put`. sweep: remove what dead writers left; False where nothing may be written.

    StoreError: the path is no absolute one, and there is no working directory any more.
    """

    def __init__(self, path: str | Path, *, sweep: bool = True) -> None:
        try:
            self._root = os.path.abspath(os.path.expanduser(path)).rstrip("/")  # "": the root of all folders
        except FileNotFoundError:
            words = "a store's folder is named from the working directory, which was deleted; name it from the root: /path"
            raise StoreError(words) from None
        super().__init__(Path(self._root or "/").as_uri(), retry_after=_RETRY_AFTER)
        self._lasting: set[str] = set()  # folders that a crash leaves in place: this handle has synced their parents
        if sweep:
            self._sweep()

    @property
    def journal_folder(self) -> str:
        """Where the tuner remembers crashes: beside the entries, under a name that is no key's folder."""
        return f"{self._root}/+journal"

    def exists(self) -> bool:
        """Whether somebody has made the directory."""
        return os.path.isdir(self._root or "/")

    def missing_folders(self, prefix: str) -> list[str]:
        """Those that a `put` below `prefix` makes."""
        folder, missing = f"{self._root}/{prefix}".rstrip("/"), []
        while folder and not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder).rstrip("/")
        return missing

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}{SUFFIX}"

    def _read(self, keys: list[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for key in keys:
            self._report()
            try:
                value = _read_file(self._path(key))
            except OSError as error:  # one unreadable file does not hide the others
                self._note(_words(error))
                continue
            if value is not None:
                found[key] = value
        return found

    def _write(self, key: str, value: bytes) -> None:
        path = self._path(key)
        for attempt in range(_ATTEMPTS):
            try:
                self._make_lasting(os.path.dirname(path))
                _publish(path, value)
                return
            except FileNotFoundError as error:  # the folder was deleted under us: make it again
                if attempt == _ATTEMPTS - 1:
                    raise Unavailable(_words(error)) from error
            except OSError as error:
                raise Unavailable(_words(error)) from error

    def _make_lasting(self, folder: str) -> None:
        """Make `folder`, and have it outlast a crash. That it is there says nothing: who made it may not have synced it yet."""
        if folder in self._lasting and os.path.isdir(folder):
            return
        top = self._root or "/"
        while not os.path.exists(os.path.dirname(top)):
            top = os.path.dirname(top)
        os.makedirs(folder, exist_ok=True)
        parent = folder
        while len(parent) >= len(top) and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
            with contextlib.suppress(PermissionError):  # one that we can't read we did not write to
                _sync_folder(parent)
        self._lasting.add(folder)

    def _remove(self, key: str) -> None:
        try:
            os.unlink(self._path(key))
            _sync_folder(os.path.dirname(self._path(key)))
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise Unavailable(_words(error)) from error

    def _scan(self, prefix: str) -> list[str]:
        keys = []
        for folder, name in _walk(f"{self._root}/{prefix}" if prefix else self._root, self._note):
            self._report()
            if name.endswith(SUFFIX) and SEGMENT.fullmatch(name, 0, len(name) - len(SUFFIX)):
                keys.append(f"{folder}/{name}"[len(self._root) + 1 : -len(SUFFIX)])
        return keys

    def _sweep(self) -> None:
        """Remove the temporary files of dead writers."""
        now_s = functools.cache(_now_s)
        for folder, name in _walk(self._root, lambda reason: None):  # what is wrong is said at the first use
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    _remove_if_dead(folder or "/", name, now_s)


def _walk(root: str, failed: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """(folder, name) of all regular files below `root`; "": the root of all folders. Links to folders are not followed, so a loop is none;
    a folder that can't be read does not hide the others."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder or "/") as items:
                for item in items:
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.path)
                    elif item.is_file(follow_symlinks=False):
                        yield folder, item.name
        except OSError as error:
            if error.errno not in _NOT_OURS:
                failed(_words(error))


def _read_file(path: str) -> bytes | None:
    """The file's bytes; None: there is none, or something that is no value of ours. Never blocks on a pipe."""
    for attempt in (1, 2):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_VALUE_BYTES:
                    return None
                return _read_all(handle, status.st_size)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno in _NOT_OURS:
                return None
            if error.errno != errno.ESTALE or attempt == 2:  # replaced on the NFS server between open and read: look again
                raise
    return None


def _read_all(handle: int, size: int) -> bytes:
    data = os.read(handle, size + 1)
    while len(data) < size and (more := os.read(handle, size - len(data))):
        data += more
    return data


def _publish(path: str, value: bytes) -> None:
    folder = os.path.dirname(path)
    temporary = _new_temporary(folder)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _hold(handle, temporary)
        rest = memoryview(value)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
        _rename(temporary, path, value)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)
    _sync_folder(folder)


def _rename(temporary: str, path: str, value: bytes) -> None:
    try:
        os.rename(temporary, path)
    except OSError:
        # Over NFS a rename that was done can be answered by an error, when the server's first answer was lost.
        if os.path.exists(temporary) or _read_file(path) != value:
            raise


def _hold(handle: int, temporary: str) -> None:
    """Lock a temporary file for as long as it is written. FileNotFoundError: a sweeper got there first and removes it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileNotFoundError(errno.ENOENT, "removed as a dead writer's", temporary) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _remove_if_dead(folder: str, name: str, now_s: Callable[[str], float]) -> None:
    handle = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dead = name.startswith(f"{TEMPORARY}{_mount(folder)}-")
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                return
            dead = False
        if dead or now_s(folder) - os.fstat(handle).st_mtime > _DEAD_AGE_S:
            os.unlink(f"{folder}/{name}")
    finally:
        os.close(handle)


def _new_temporary(folder: str) -> str:
    return f"{folder}/{TEMPORARY}{_mount(folder)}-{uuid.uuid4().hex}"


def _mount(folder: str) -> str:
    """Says which running kernel sees `folder` through which mount: whoever says the same sees the same locks."""
    return hashlib.sha256(f"{_boot_id()} {os.stat(folder).st_dev}".encode()).hexdigest()[:16]


@functools.cache
def _boot_id() -> str:
    return boot_id() or uuid.uuid4().hex  # where none is known, only this process is known to be on this host


def _now_s(folder: str) -> float:
    """The file system's own time, whatever this host's clock says."""
    temporary = _new_temporary(folder)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that sync a folder by themselves
            raise
    finally:
        os.close(handle)


def _words(error: OSError) -> str:
    return f"{error.strerror or error} ({error.filename})" if error.filename else str(error.strerror or error)
