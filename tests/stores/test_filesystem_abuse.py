"""A directory under abuse. The bar: no wrong hit, no exception to the caller, no acknowledged entry lost (deleted storage aside),
no temporary file left after the next attach."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgpack
import pytest
from tmpfs import tmpfs, two_mounts

from moe_dist.stores import filesystem
from moe_dist.stores.base import MAX_VALUE_BYTES
from moe_dist.stores.codec import Malformed, decode_entry, encode_entry
from moe_dist.stores.filesystem import SUFFIX, TEMPORARY, FilesystemStore
from moe_dist.tuning.problem import Entry, Tactic, Timed, digest, pack

TIME = Timed(12.5, 0.25, 40)


def entry_of(key, note=""):
    return Entry(pack(key), Tactic.of("triton", block_m=64), TIME, Tactic.of("torch_grouped"), TIME, {"note": note})


def temporaries(root):
    """Every file that is no value, whatever its name."""
    return [path for path in Path(root).rglob("*") if path.is_file() and not path.name.endswith(SUFFIX)]


def warnings_of(caplog):
    return [record for record in caplog.records if record.name == "moe_dist.stores"]


# --- writers that are killed

WRITERS = """
import os, random, signal, sys, time
from moe_dist.stores.codec import encode_entry
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning.problem import Entry, Tactic, Timed, pack
root, acks = sys.argv[1:]
TIME = Timed(12.5, 0.25, 40)

def write(writer):
    store = FilesystemStore(root)
    ack = os.open(f"{acks}/{writer}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for count in range(1_000_000):
        # its own key, which it alone writes; a key of all; a key that is new each time
        for key in (f"own/w{writer}", f"common/k{count % 3}", f"new/w{writer}/n{count}"):
            entry = Entry(pack(key), Tactic.of("triton", w=writer), TIME, Tactic.of("torch"), TIME, {"count": str(count), "pad": "x" * 2000})
            if store.put(key, encode_entry(entry)):
                os.write(ack, f"{key} {count}\\n".encode())

children = []
for writer in range(16):
    child = os.fork()
    if child == 0:
        try:
            write(writer)
        finally:
            os._exit(1)
    children.append(child)
print("started", flush=True)
time.sleep(1.5)
for child in children:
    time.sleep(random.random() * 0.05)
    os.kill(child, signal.SIGKILL)
statuses = [os.waitpid(child, 0)[1] for child in children]
print(statuses.count(signal.SIGKILL), flush=True)
"""


def test_sixteen_writers_killed_in_the_middle(tmp_path):
    root, acks = tmp_path / "store", tmp_path / "acks"
    acks.mkdir()
    with subprocess.Popen([sys.executable, "-c", WRITERS, str(root), str(acks)], stdout=subprocess.PIPE, text=True) as crew:
        assert crew.stdout.readline() == "started\n"
        store, read = FilesystemStore(root), 0
        while crew.poll() is None:
            for key in (f"own/w{read % 16}", f"common/k{read % 3}"):
                value = store.get(key)
                if value is not None:
                    decode_entry(value, digest(key))  # raises on a part, or on another key's entry
            read += 1
            time.sleep(0.002)
        assert crew.stdout.read() == "16\n"  # all died by the signal, none by an exception
    assert read > 1

    store = FilesystemStore(root)
    assert temporaries(root) == []
    assert store.degraded is None
    acknowledged = [line.split() for path in acks.iterdir() for line in path.read_text().splitlines()]
    assert len(acknowledged) > 100
    found = {key: decode_entry(value, digest(key)) for key, value in store.get_many(key for key, _ in acknowledged).items()}
    assert set(found) == {key for key, _ in acknowledged}
    for key, count in acknowledged:
        if not key.startswith("common/"):  # its writer's last acknowledged value, or one that was published and not acknowledged
            assert int(found[key].provenance["count"]) >= int(count)
    for key in store.list(""):
        decode_entry(store.get(key), digest(key))


def test_an_interrupt_in_the_middle_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    store = FilesystemStore(tmp_path)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put("a/b", b"1")
    assert temporaries(tmp_path) == []
    assert store.get("a/b") is None


def test_a_directory_that_is_deleted_again_and_again(tmp_path):
    store, done = FilesystemStore(tmp_path / "s"), threading.Event()

    def remove():
        while not done.is_set():
            shutil.rmtree(tmp_path / "s", ignore_errors=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(200):
            store.put(f"a/b/k{number}", b"1")
            store.get(f"a/b/k{number}")
            store.list("a")
    finally:
        done.set()
        remover.join()
    assert store.put("a/b/after", b"2")
    assert FilesystemStore(tmp_path / "s").get("a/b/after") == b"2"
    assert temporaries(tmp_path) == []


# --- a machine that loses its power


class ForgetfulDisk:
    """What of `base` a crash leaves: the bytes of a file as they were when it was synced, the names in a folder as when that was."""

    def __init__(self, base, monkeypatch):
        self.base, self.bytes, self.names = base, {}, {base.stat().st_ino: {}}
        fsync, opened, mkdir = os.fsync, os.open, os.mkdir

        def sync(handle):
            fsync(handle)
            inode = os.fstat(handle).st_ino
            if inode in self.names:
                self.names[inode] = {item.name: item.inode() for item in os.scandir(f"/proc/self/fd/{handle}")}
            else:
                self.bytes[inode] = Path(f"/proc/self/fd/{handle}").read_bytes()

        def create(path, flags, *mode, **options):
            handle = opened(path, flags, *mode, **options)
            if flags & os.O_CREAT:
                self.bytes[os.fstat(handle).st_ino] = b""
                self.names.pop(os.fstat(handle).st_ino, None)  # the number of a folder that is gone
            return handle

        def make(path, *mode, **options):
            mkdir(path, *mode, **options)
            self.names[os.stat(path).st_ino] = {}

        self.mkdir = mkdir
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "open", create)
        monkeypatch.setattr(os, "mkdir", make)

    def after_a_crash(self, folder, of=None):
        """Lay it out in `folder`."""
        self.mkdir(folder)
        for name, inode in self.names[of or self.base.stat().st_ino].items():
            if inode in self.names:
                self.after_a_crash(folder / name, inode)
            else:
                (folder / name).write_bytes(self.bytes[inode])
        return folder


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is synced is read through /proc")
def test_what_was_acknowledged_outlives_a_crash_that_forgets_what_was_not_synced(tmp_path, monkeypatch):
    base = tmp_path / "disk"
    base.mkdir()
    disk, crashes = ForgetfulDisk(base, monkeypatch), iter(range(100))

    def left(root):
        store = FilesystemStore(disk.after_a_crash(tmp_path / f"crash{next(crashes)}") / root)
        return store.get_many(store.list(""))

    store = FilesystemStore(base / "no/such/folder")
    acknowledged = {}
    for key, value in (("a/b/k1", b"1"), ("a/b/k2", b"2"), ("a/b/k1", b"longer"), ("a/c", b"3"), ("top", b"4")):
        assert store.put(key, value)
        acknowledged[key] = value
        assert left("no/such/folder") == acknowledged
    for key in list(acknowledged):
        store.delete(key)
        del acknowledged[key]
        assert left("no/such/folder") == acknowledged

    # Another writer has made the folders and has not synced them yet.
    (base / "other").mkdir()
    store = FilesystemStore(base / "other")
    os.makedirs(base / "other/x/y")
    assert left("other") == {}
    assert store.put("x/y/k", b"5")
    assert left("other") == {"x/y/k": b"5"}


# --- disks that say no


def test_a_disk_that_is_really_full_and_then_read_only(tmp_path, caplog):
    with tmpfs(tmp_path / "disk", "128k"):
        store = FilesystemStore(tmp_path / "disk")
        taken = [number for number in range(40) if store.put(f"a/k{number}", bytes(10_000))]
        assert 0 < len(taken) < 13
        assert temporaries(tmp_path) == []
        assert len(store.list("a")) == len(store.get_many([f"a/k{number}" for number in range(40)])) == 40
        assert FilesystemStore(tmp_path / "disk").list("a") == sorted(f"a/k{number}" for number in taken)
        (warning,) = warnings_of(caplog)
        assert f"store file://{tmp_path}/disk: No space left on device" in warning.getMessage()
        for number in range(40):  # where there is room again, it goes to what was kept
            store.delete(f"a/k{number}")
        assert store.list("a") == FilesystemStore(tmp_path / "disk").list("a") == []
        assert store.put("a/k39", bytes(10_000))

        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        store = FilesystemStore(tmp_path / "disk")
        assert store.get("a/k39") == bytes(10_000)
        assert store.degraded is None
        assert not store.put("a/k1", b"1")
        store.delete("a/k39")
        assert store.list("a") == ["a/k1"]
        assert FilesystemStore(tmp_path / "disk").list("a") == ["a/k39"]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.EBUSY, errno.EXDEV, errno.EMFILE], ids=errno.errorcode.get
)  # fmt: skip
@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
def test_every_call_may_fail(call, number, tmp_path, monkeypatch, caplog):
    store = FilesystemStore(tmp_path / "s")

    def fail(*args, **options):
        raise OSError(number, os.strerror(number), "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert not store.put("a/b", b"1")
        assert not store.put("a/c", b"2")
        assert os.strerror(number) in store.degraded
        if call != "open":
            assert store.get_many(["a/b", "a/c"]) == {"a/b": b"1", "a/c": b"2"}
        assert store.list("a") == ["a/b", "a/c"]
    assert temporaries(tmp_path) == []
    assert FilesystemStore(tmp_path / "s").list("") == []
    (warning,) = warnings_of(caplog)
    assert f"store file://{tmp_path}/s: {os.strerror(number)}" in warning.getMessage()
    assert store.put("a/b", b"3")
    assert FilesystemStore(tmp_path / "s").get("a/b") == b"3"


@pytest.fixture
def as_nobody():
    """A folder that this process may not write: root may write everywhere, so it steps down for the test."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    root = os.geteuid() == 0

    @contextlib.contextmanager
    def nobody():
        if root:
            os.seteuid(65534)
        try:
            yield
        finally:
            if root:
                os.seteuid(0)

    yield folder, nobody
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_directory_without_write_permission(as_nobody, caplog):
    folder, nobody = as_nobody
    FilesystemStore(folder).put("a/b", b"1")
    for path in (folder, folder / "a"):
        path.chmod(0o555)
    with nobody():
        store = FilesystemStore(folder)
        assert store.get("a/b") == b"1"
        assert store.list("") == ["a/b"]
        assert warnings_of(caplog) == []  # a reader needs no more
        assert not store.put("a/c", b"2")
        assert not store.put("d/e", b"3")
        store.delete("a/b")
        assert store.list("") == ["a/c", "d/e"]
        (warning,) = warnings_of(caplog)
        assert f"store file://{folder}: Permission denied" in warning.getMessage()


def test_an_unreadable_file_or_folder_hides_nothing_else(as_nobody, caplog):
    folder, nobody = as_nobody
    for key in ("a/open", "a/shut", "b/inside"):
        FilesystemStore(folder).put(key, b"1")
    (folder / f"a/shut{SUFFIX}").chmod(0)
    (folder / "b").chmod(0)
    with nobody():
        store = FilesystemStore(folder)
        assert store.get_many(["a/shut", "a/open", "b/inside"]) == {"a/open": b"1"}
        assert "Permission denied" in store.degraded
        assert store.list("") == ["a/open", "a/shut"]
        assert len(warnings_of(caplog)) == 1
        assert store.get("a/open") == b"1"
        assert store.degraded is None


@pytest.mark.parametrize("kind", ["dangling", "loop"])
def test_a_root_that_is_a_broken_link(kind, tmp_path, caplog):
    os.symlink(tmp_path / ("link" if kind == "loop" else "nowhere"), tmp_path / "link")
    store = FilesystemStore(tmp_path / "link")
    assert not store.put("a/b", b"1")
    assert store.get("a/b") == b"1"
    assert len(warnings_of(caplog)) == 1


# --- what NFS does


def test_a_rename_that_was_done_but_answered_by_an_error_is_a_success(tmp_path, monkeypatch):
    rename = os.rename

    def lost_answer(source, target):
        rename(source, target)
        raise OSError(errno.EIO, "answer lost")

    monkeypatch.setattr(os, "rename", lost_answer)
    store = FilesystemStore(tmp_path)
    assert store.put("a/b", b"1")
    assert store.put("a/b", b"2")
    assert FilesystemStore(tmp_path).get("a/b") == b"2"
    assert temporaries(tmp_path) == []


def test_a_file_that_is_replaced_on_the_server_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    store, failures = FilesystemStore(tmp_path), [1]
    store.put("a/b", b"1")
    read = os.read

    def stale_once(handle, size):
        if failures:
            failures.pop()
            raise OSError(errno.ESTALE, "stale")
        return read(handle, size)

    monkeypatch.setattr(os, "read", stale_once)
    assert store.get("a/b") == b"1"
    assert not failures
    assert store.degraded is None


def test_where_files_cannot_be_locked_only_an_old_temporary_file_is_a_dead_writers(tmp_path, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert FilesystemStore(tmp_path).put("a/b", b"1")
    young, old = tmp_path / f"a/{TEMPORARY}young", tmp_path / f"a/{TEMPORARY}old"
    for path in (young, old):
        path.write_bytes(b"part")
    os.utime(old, (0, 0))
    FilesystemStore(tmp_path)
    assert temporaries(tmp_path) == [young]


def attach_at_each_sync(monkeypatch, attach):
    """`attach` is called whenever a value's file has been synced, before it has its name."""
    fsync = os.fsync

    def attach_first(handle):
        fsync(handle)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            attach()

    monkeypatch.setattr(os, "fsync", attach_first)


@pytest.mark.parametrize("host", ["another", "this"])
def test_where_locks_are_each_hosts_own_no_other_host_removes_a_live_writers_file(host, tmp_path, monkeypatch):
    """Each lock is granted, as it is to another host. This host's locks prove what they say: there, it takes the file for a dead one's."""
    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: None)
    left = []

    def attach():
        with monkeypatch.context() as patch:
            if host == "another":
                patch.setattr(filesystem, "_boot_id", lambda: "another kernel's")
            FilesystemStore(tmp_path)
        left.append(len(temporaries(tmp_path)))

    attach_at_each_sync(monkeypatch, attach)
    store = FilesystemStore(tmp_path)
    assert store.put("a/b", b"1") is (host == "another")
    assert left == ([1] if host == "another" else [0, 0, 0])  # it is tried three times


def test_a_live_writer_that_stalled_until_another_host_took_it_for_dead_writes_again(tmp_path, monkeypatch):
    """As when a file server was gone for a while; locks are each host's own."""
    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: None)
    left = []

    def attach():
        if not left:
            (stalled,) = temporaries(tmp_path)
            os.utime(stalled, (0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "_boot_id", lambda: "another kernel's")
            FilesystemStore(tmp_path)
        left.append(len(temporaries(tmp_path)))

    attach_at_each_sync(monkeypatch, attach)
    assert FilesystemStore(tmp_path).put("a/b", b"1")
    assert left == [0, 1]
    assert FilesystemStore(tmp_path).get("a/b") == b"1"


def test_through_two_mounts_with_locks_of_their_own_nobody_removes_a_live_writers_file(tmp_path, monkeypatch):
    with two_mounts(tmp_path / "disk") as (one, two):
        store, left = FilesystemStore(one), []

        def attach():
            FilesystemStore(two)
            left.append(len(temporaries(two)))

        attach_at_each_sync(monkeypatch, attach)
        assert store.put("a/b", b"1")
        assert left == [1]
        assert store.degraded is None
        assert FilesystemStore(two).get("a/b") == b"1"
        assert temporaries(one) == []


def test_a_strangers_temporary_file_goes_at_five_minutes_by_the_file_systems_own_time(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this host's clock is far ahead
    FilesystemStore(tmp_path).put("a/b", b"1")
    now_s = (tmp_path / f"a/b{SUFFIX}").stat().st_mtime
    paths = {name: tmp_path / f"a/{TEMPORARY}{name}" for name in ("0123456789abcdef-old", "0123456789abcdef-young", "oldname", "youngname")}
    for name, path in paths.items():
        path.write_bytes(b"part")
        age_s = 310 if "old" in name else 60  # four minutes for this test
        os.utime(path, (now_s - age_s, now_s - age_s))
    FilesystemStore(tmp_path)
    assert sorted(temporaries(tmp_path)) == sorted(path for name, path in paths.items() if "young" in name)


# --- files that are not what they should be

KEY = "entries/e1/k1"
GOOD = encode_entry(entry_of(KEY))


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def with_version(version):
    body = msgpack.unpackb(GOOD)
    return msgpack.packb({**body, "v": version})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode_entry(entry_of("entries/e2/k1")), "lies where"),  # misplaced by hand, or another environment's
        (with_version(0), "format version 0; this release reads 1"),
        (with_version(2), "format version 2; this release reads 1"),
        (b"", "not msgpack"),
        (json.dumps({"v": 1}).encode(), "not msgpack|no map"),
        (pickle.dumps(Bomb()), "not msgpack|no map"),
        (b"PK\x03\x04" + bytes(100), "not msgpack|no map"),
        (msgpack.packb([1, 2]), "no map"),
        (msgpack.packb({"v": 1, "kind": "epoch"}), "kind 'epoch'"),
        (bytes(1 << 20), "the limit is"),
    ],
    ids=["other key", "older", "newer", "empty", "json", "pickle", "zip", "list", "epoch", "large"],
)
def test_a_foreign_file_in_an_entrys_place_is_a_miss_with_its_reason(data, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = FilesystemStore(tmp_path)
    store.put(KEY, GOOD)
    (tmp_path / f"{KEY}{SUFFIX}").write_bytes(data)
    with pytest.raises(Malformed, match=reason):
        decode_entry(store.get(KEY), digest(KEY))
    assert not (tmp_path / "executed").exists()
    assert store.put(KEY, GOOD)  # and the next save replaces it
    assert decode_entry(store.get(KEY), digest(KEY)) == entry_of(KEY)


def test_a_file_longer_than_any_value_is_not_read(tmp_path, caplog):
    """A sparse one takes no room to leave, and all memory to read."""
    store = FilesystemStore(tmp_path)
    for size, found in ((MAX_VALUE_BYTES, MAX_VALUE_BYTES), (MAX_VALUE_BYTES + 1, None), (1 << 62, None)):
        assert store.put("x/y", b"1")
        try:
            os.truncate(tmp_path / f"x/y{SUFFIX}", size)
        except OSError:
            assert size == 1 << 62  # this file system has no file of that size
            continue
        value = store.get("x/y")
        assert (value and len(value)) == found
        assert store.list("x") == ["x/y"]
    assert store.put("x/y", b"2")
    assert store.get("x/y") == b"2"
    assert store.degraded is None


def test_a_file_damaged_at_any_byte_is_never_a_hit(tmp_path):
    store = FilesystemStore(tmp_path)
    assert store.put(KEY, GOOD)
    path = tmp_path / f"{KEY}{SUFFIX}"
    damaged = [GOOD[:length] for length in range(len(GOOD))]
    damaged += [GOOD[:at] + bytes([GOOD[at] ^ 0xFF]) + GOOD[at + 1 :] for at in range(len(GOOD))]
    damaged += [GOOD[:at] + b"\0" + GOOD[at:] for at in range(len(GOOD) + 1)]
    for data in damaged:
        path.write_bytes(data)
        value = store.get(KEY)
        assert value == data
        with pytest.raises(Malformed):
            decode_entry(value, digest(KEY))
    assert store.degraded is None


def test_an_entry_copied_by_hand_to_another_host_hits(tmp_path):
    entry = dataclasses.replace(entry_of(KEY), provenance={"host": "one"})
    FilesystemStore(tmp_path / "one").put(KEY, encode_entry(entry))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert decode_entry(FilesystemStore(tmp_path / "two").get(KEY), digest(KEY)) == entry
