"""`moe-dist store` and `moe-dist doctor` over a small store on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe_dist.cli.main import main
from moe_dist.stores.codec import encode_entry, encode_epoch
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning.problem import Bucket, Cell, Entry, Epoch, Problem, Tactic, Timed, Winner, pack

CELL = Cell(Problem.of("moe_layer", experts=8), "eager", Bucket(3, 4))
FAST, SLOW = Tactic.of("triton", tile=64), Tactic.of("torch_loop")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    store = FilesystemStore(tmp_path)
    key = pack({"cell": CELL, "policy": "eager"})
    entry = encode_entry(Entry(key, FAST, Timed(10.0, 0.5, 3), SLOW, Timed(20.0, 1.0, 3), {"host": "h"}))
    store.put("entries/e/1", entry)
    store.put("epochs/d/00000001", encode_epoch(Epoch(1, "prod", {CELL: Winner(FAST, 10.0, SLOW, 20.0, "tuned")}), {"entries/e/k": entry}))
    store.put("entries/e/bad", b"no entry")
    return str(tmp_path)


def test_ls_says_what_each_value_is(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("moe_layer eager tokens 3-4: triton(tile=64) 10.0 us, default torch_loop 20.0 us")
    assert lines[1].startswith("entries/e/bad  (unreadable: ")
    assert lines[2] == "epochs/d/00000001  epoch 1 of 'prod': 1 winners, 1 entries"
    assert main(["store", "--store", folder, "ls", "epochs/"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[2:]


def test_show_gives_the_content(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, "show", "entries/e/1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tactic"] == "triton(tile=64)"
    assert (shown["median_us"], shown["default_us"], shown["provenance"]) == (10.0, 20.0, {"host": "h"})
    assert shown["key"]["cell"]["bucket"] == {"high": 4, "low": 3}
    assert main(["store", "--store", folder, "show", "epochs/d/00000001"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["number"], shown["deployment"], shown["winners"][0]["tactic"]) == (1, "prod", "triton(tile=64)")


def test_rm_takes_keys_and_prefixes(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, "rm", "entries/e/bad", "epochs"]) == 0
    assert capsys.readouterr().out.splitlines() == ["removed 1 values at entries/e/bad", "removed 1 values at epochs"]
    assert FilesystemStore(folder).list("") == ["entries/e/1"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (["show", "entries/e/2"], "holds no 'entries/e/2'; `moe-dist store ls` lists its keys"),
        (["show", "entries/e/bad"], "entries/e/bad: .*; remove it with `moe-dist store rm`"),
        (["rm", "entries/f"], "holds nothing at or below 'entries/f'"),
        (["rm", "Entries"], "'Entries' is no store key"),
    ],
)
def test_wrong_keys_are_refused(folder: str, action: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, *action]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_doctor_checks_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--store", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "written, read back and removed a value" in said
    assert "backend torch_grouped on cpu: runs a small bf16 layer" in said
    assert FilesystemStore(tmp_path / "new").list("") == []
    # A store that dies with its process keeps nothing for the next one.
    assert main(["doctor", "--store", "memory:"]) == 1
    assert "store memory:: does not keep what is written" in capsys.readouterr().out
