"""The store in a directory: what a disk, a killed writer or a stranger's file can do to it."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_dist.errors import StoreError
from moe_dist.stores import filesystem
from moe_dist.stores.filesystem import SUFFIX, TEMPORARY, FilesystemStore
from moe_dist.stores.open import open_store


def temporaries(root):
    return [path for path in Path(root).rglob("*") if path.name.startswith(TEMPORARY)]


def test_two_handles_share_and_a_new_value_replaces(tmp_path):
    one, two = FilesystemStore(tmp_path / "s"), FilesystemStore(tmp_path / "s")
    assert one.put("entries/e1/k1", b"old")
    assert one.put("entries/e1/k1", b"new")
    assert two.get("entries/e1/k1") == b"new"
    assert two.list("entries") == ["entries/e1/k1"]
    two.delete("entries/e1/k1")
    assert one.get("entries/e1/k1") is None


def test_a_key_may_be_the_prefix_of_another(tmp_path):
    store = FilesystemStore(tmp_path)
    for key in ("a", "a/b", "a/b/c"):
        assert store.put(key, key.encode())
    assert store.list("") == ["a", "a/b", "a/b/c"]
    assert store.list("a") == ["a/b", "a/b/c"]
    assert store.get("a/b") == b"a/b"


def test_a_dead_writers_temporary_file_goes_at_the_next_attach_and_a_live_ones_stays(tmp_path):
    code = (
        "import os, stat, sys; from moe_dist.stores import filesystem\n"
        "def hold(fd):\n"
        "    if stat.S_ISREG(os.fstat(fd).st_mode): print('writing', flush=True); sys.stdin.read()\n"
        "os.fsync = hold\n"
        "filesystem.FilesystemStore(sys.argv[1]).put('a/b', b'value')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        FilesystemStore(tmp_path)
        assert len(temporaries(tmp_path)) == 1
        writer.kill()
        writer.wait(60)
    assert len(temporaries(tmp_path)) == 1
    assert FilesystemStore(tmp_path).list("") == []
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("url", ["read-only:{}", "read-only:file://{}", "read-only:layered:{},memory:", "layered:memory:,read-only:{}"])
def test_below_read_only_nothing_is_made_or_removed(url, tmp_path, monkeypatch):
    """Neither a dead writer's temporary file goes, nor is the file system asked for its time, which takes a file."""
    assert FilesystemStore(tmp_path).put("a/b", b"value")
    Path(filesystem._new_temporary(str(tmp_path / "a"))).write_bytes(b"dead")
    (tmp_path / "a" / f"{TEMPORARY}0123456789abcdef-elsewhere").write_bytes(b"a stranger's")
    there, opened, real = sorted(tmp_path.rglob("*")), [], os.open

    def watched(path, flags, *rest, **options):
        opened.append(flags)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", watched)
    store = open_store(url.format(tmp_path))
    assert store.get("a/b") == b"value"
    store.put("a/b", b"own")
    store.delete("a/b")
    assert sorted(tmp_path.rglob("*")) == there
    assert opened
    assert not any(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) for flags in opened)


def test_the_root_of_all_folders(tmp_path, monkeypatch):
    """It is its own parent, which ends the way up that is synced."""
    synced = []

    def sync(folder):
        synced.append(folder)
        assert len(synced) < 100

    monkeypatch.setattr(filesystem, "_sync_folder", sync)
    FilesystemStore("/", sweep=False)._make_lasting(str(tmp_path / "made"))
    assert (tmp_path / "made").is_dir()
    assert synced == [str(parent) for parent in (tmp_path, *tmp_path.parents)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take another folder for the root of all")
def test_a_store_in_the_root_of_all_folders(tmp_path):
    """Its keys come back whole: in a process whose root is a folder of this test."""
    (tmp_path / "entries/e1").mkdir(parents=True)
    dead = [tmp_path / f"{TEMPORARY}dead", tmp_path / f"entries/e1/{TEMPORARY}dead"]
    for path in dead:
        path.touch()
        os.utime(path, (0, 0))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.chroot(tmp_path)
            store = FilesystemStore("/")
            put = [store.put(key, key.encode()) for key in ("top", "entries/e1/k1")]
            found = [store.list(""), store.list("entries"), store.get_many(store.list("")), store.url, store.exists(), store.degraded]
            os.write(write, repr([put, *found]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = ast.literal_eval(answer.read())
    os.waitpid(child, 0)
    values = {"entries/e1/k1": b"entries/e1/k1", "top": b"top"}
    assert said == [[True, True], [*values], ["entries/e1/k1"], values, "file:///", True, None]
    assert not any(path.exists() for path in dead)
    assert FilesystemStore(tmp_path).get_many(values) == values


def test_a_writer_whose_temporary_file_vanishes_writes_again(tmp_path, monkeypatch):
    fsync, removed = os.fsync, []

    def remove_first(handle):
        if not removed and temporaries(tmp_path):
            removed.extend(temporaries(tmp_path))
            removed[0].unlink()
        fsync(handle)

    monkeypatch.setattr(os, "fsync", remove_first)
    store = FilesystemStore(tmp_path)
    assert store.put("a/b", b"value")
    assert removed
    assert FilesystemStore(tmp_path).get("a/b") == b"value"


def test_a_directory_deleted_while_in_use_is_made_again(tmp_path):
    store = FilesystemStore(tmp_path / "s")
    assert store.put("a/b", b"1")
    (tmp_path / "s/a" / f"b{SUFFIX}").unlink()
    (tmp_path / "s/a").rmdir()
    (tmp_path / "s").rmdir()
    assert store.get("a/b") is None
    assert store.put("a/b", b"2")
    assert store.get("a/b") == b"2"
    assert store.degraded is None


def test_a_file_in_the_way_degrades_to_memory_with_one_warning_that_names_the_path(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    store = FilesystemStore(tmp_path / "file")
    assert not store.put("a/b", b"1")
    assert not store.put("a/c", b"2")
    assert store.get_many(["a/b", "a/c", "a/d"]) == {"a/b": b"1", "a/c": b"2"}
    assert store.list("a") == ["a/b", "a/c"]
    store.delete("a/b")
    assert store.list("a") == ["a/c"]
    assert len(caplog.records) == 1
    assert str(tmp_path / "file") in caplog.text


def test_a_pipe_a_folder_and_foreign_files_are_misses(tmp_path):
    store = FilesystemStore(tmp_path)
    store.put("a/real", b"1")
    os.mkfifo(tmp_path / f"a/pipe{SUFFIX}")
    (tmp_path / f"a/folder{SUFFIX}").mkdir()
    (tmp_path / f"a/UPPER{SUFFIX}").write_text("no key names this")
    (tmp_path / "a/README").write_text("foreign")
    os.symlink(tmp_path, tmp_path / "a/loop")
    reader = threading.Thread(target=lambda: seen.update(store.get_many(["a/pipe", "a/folder", "a/real"])), daemon=True)
    seen = {}
    reader.start()
    reader.join(30)
    assert seen == {"a/real": b"1"}
    assert store.list("") == ["a/real"]
    FilesystemStore(tmp_path)
    assert (tmp_path / "a/README").exists()


def test_a_symlinked_root(tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert FilesystemStore(tmp_path / "link").put("a/b", b"1")
    assert FilesystemStore(tmp_path / "real").get("a/b") == b"1"


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "A", "a b", "a+value", "é", "x" * 201, "a/" * 300 + "a"]
)
def test_a_wrong_key_is_refused(tmp_path, key):
    store = FilesystemStore(tmp_path)
    for call in (store.get, store.delete, lambda key: store.put(key, b""), lambda key: store.get_many([key])):
        with pytest.raises(StoreError, match="is no store key: use segments"):
            call(key)


def test_open_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("memory:").url == "memory:"
    assert open_store(f"file://{tmp_path}/a%20b").url == f"file://{tmp_path}/a%20b"
    assert open_store(str(tmp_path)).url == f"file://{tmp_path}"
    assert open_store("sub/dir").url == f"file://{tmp_path}/sub/dir"
    with pytest.raises(StoreError, match="the store URL is empty; use one of memory:"):
        open_store(" ")
    with pytest.raises(StoreError, match=r"scheme 'http:' is unknown; use one of memory:, file:"):
        open_store("http://host/x")
    with pytest.raises(StoreError, match="names no local path"):
        open_store("file://elsewhere/x")
    with pytest.raises(StoreError, match="is empty"):
        open_store("")


def test_a_relative_path_in_a_working_directory_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="a store's folder is named from the working directory, which was deleted; name it from the root"):
        open_store("winners")
    assert open_store(str(tmp_path / "other")).put("x/y", b"1")


def test_a_folder_whose_name_has_a_line_break_is_said_in_one_line(tmp_path, caplog):
    root = tmp_path / os.fsdecode(b"two\nlines\xff")
    root.write_text("in the way")
    store = FilesystemStore(root)
    assert not store.put("x/y", b"1")
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "two%0Alines%FF: Not a directory" in record.getMessage()
    assert store.degraded.isprintable()
