"""`moe-dist store` and `moe-dist doctor` over a small store on disk."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_dist.backends.base import MoEProblem
from moe_dist.cli.main import main
from moe_dist.config import ExpertConfig, MoEConfig, ParallelConfig, QuantConfig, RoutingConfig
from moe_dist.serving import stored_epochs
from moe_dist.stores.codec import encode_entry, encode_epoch
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.filesystem import _new_temporary as new_temporary
from moe_dist.tuning.problem import Bucket, Cell, Entry, Epoch, Problem, Tactic, Timed, Winner, pack

CONFIG = MoEConfig(
    routing=RoutingConfig(8, 2), experts=ExpertConfig(hidden_size=64, intermediate_size=128), parallel=ParallelConfig(ep_size=2)
)
LAYER = "moe_layer 8 experts, top-2, hidden 64, intermediate 128, bf16; tp 1, ep 2"
CELL = Cell(MoEProblem.of(CONFIG, routed=False).key(), "eager", Bucket(3, 4))
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
    said = capsys.readouterr()
    assert said.err == f"3 values in file://{folder}\n"
    lines = said.out.splitlines()
    assert lines[0] == f"entries/e/1  {LAYER}; eager tokens 3-4: triton(tile=64) 10.0 us, default torch_loop 20.0 us"
    assert lines[1].startswith("entries/e/bad  (unreadable: ")
    assert lines[2] == "epochs/d/00000001  epoch 1 of 'prod': 1 winner, 1 entry: " + LAYER
    assert main(["store", "--store", folder, "ls", "epochs/"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == lines[2:]
    assert said.err == f"1 value in file://{folder}\n"


PROBLEMS = {  # of which a line tells it
    "moe_layer 8 experts, top-2, hidden 64, intermediate 128, bf16; tp 2, ep 1": MoEProblem.of(
        dataclasses.replace(CONFIG, parallel=ParallelConfig(tp_size=2)), routed=False
    ).key(),
    "moe_layer 8 experts, top-2, hidden 64, intermediate 128, fp8; tp 1, ep 2, routed": MoEProblem.of(
        dataclasses.replace(CONFIG, quant=QuantConfig(weight="fp8")), routed=True
    ).key(),
    "finalize_all_reduce dtype bf16, hidden_size 256, ranks 2, slots 2": Problem.of(
        "finalize_all_reduce", hidden_size=256, slots=2, dtype="bf16", ranks=2
    ),
    "moe_layer": Problem.of("moe_layer", routing={"top_k": 2}),  # another release's
    "bare": Problem.of("bare"),
}


def test_ls_says_of_which_problem_a_value_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, cells = FilesystemStore(tmp_path), [Cell(problem, "eager", Bucket(1, 1)) for problem in PROBLEMS.values()]
    for at, cell in enumerate(cells):
        store.put(f"entries/e/{at}", encode_entry(Entry(pack({"cell": cell}), FAST, Timed(10.0, 0.5, 3), SLOW, None)))
    store.put("epochs/d/1", encode_epoch(Epoch(1, "prod", {cell: Winner(FAST, 10.0, SLOW, 20.0, "tuned") for cell in cells}), {}))
    assert main(["store", "--store", str(tmp_path), "ls"]) == 0
    *lines, epoch = capsys.readouterr().out.splitlines()
    assert lines == [
        f"entries/e/{at}  {words}; eager tokens 1: triton(tile=64) 10.0 us, default torch_loop fails" for at, words in enumerate(PROBLEMS)
    ]
    assert epoch == f"epochs/d/1  epoch 1 of 'prod': 5 winners, 0 entries: {' | '.join(sorted(PROBLEMS)[:3])} and 2 more"


def test_show_gives_the_content(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, "show", "entries/e/1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tactic"] == "triton(tile=64)"
    assert (shown["median_us"], shown["default_us"], shown["provenance"]) == (10.0, 20.0, {"host": "h"})
    assert shown["key"]["cell"]["bucket"] == {"high": 4, "low": 3}
    assert main(["store", "--store", folder, "show", "epochs/d/00000001"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["number"], shown["deployment"], shown["winners"][0]["tactic"]) == (1, "prod", "triton(tile=64)")
    assert (shown["winners"][0]["problem"], shown["winners"][0]["cell"]) == (LAYER, str(CELL))


def test_rm_takes_keys_and_prefixes(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, "rm", "entries/e/bad", "epochs"]) == 0
    assert capsys.readouterr().out.splitlines() == ["removed 1 value at entries/e/bad", "removed 1 value at epochs"]
    assert FilesystemStore(folder).list("") == ["entries/e/1"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (["show", "entries/e/2"], "holds no 'entries/e/2'; `moe-dist store ls` lists its keys"),
        (["show", "entries/e/bad"], "entries/e/bad: .*; remove it with `moe-dist store rm`"),
        (["rm", "entries/f"], "holds nothing at or below 'entries/f'"),
        (["rm", "Entries"], "'Entries' is no store key"),
        (["ls", "Entries"], "'Entries' is no store key"),
        (["ls", "nowhere"], "holds nothing at or below 'nowhere'; `moe-dist store ls` lists its keys$"),
        (["ls", "entries/e/2"], "holds nothing at or below 'entries/e/2'"),
    ],
)
def test_wrong_keys_are_refused(folder: str, action: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", folder, *action]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("action", ["ls", "show", "rm"])
def test_a_place_where_a_key_belongs_is_told_from_one(
    action: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a default store that is there and with one that is not: a newcomer's first try."""
    (Path(folder) / "winners").mkdir()
    monkeypatch.chdir(folder)
    for default in (folder, f"{folder}/nosuch"):
        monkeypatch.setenv("MOE_DIST_STORE", default)
        for name in (folder, "./winners/"):
            assert main(["store", action, name]) == 2
            assert capsys.readouterr().err == f"moe-dist: {name!r} is no key; {name!r} is a folder: did you mean --store {name}?\n"
        assert main(["store", action, "redis://:secret@host"]) == 2
        said = capsys.readouterr().err
        assert said == f"moe-dist: `store {action}` was given a URL where a key belongs; did you mean --store?\n"
        if default != folder or action != "show":
            assert main(["store", action, "winners"]) == 2  # might be a key
            assert "; 'winners' is a folder: did you mean --store winners?" in capsys.readouterr().err
    assert len(FilesystemStore(folder).list("")) == 3


def test_a_key_is_one_whatever_folders_are_here(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here/entries/e/1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert main(["store", "--store", folder, "ls", "entries/e/1"]) == 0
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["entries/e/1"]
    assert main(["store", "--store", folder, "ls", "entries"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def unreachable() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"redis://:secret@127.0.0.1:{probe.getsockname()[1]}/0"


@pytest.mark.parametrize("action", [["ls"], ["ls", "entries"], ["show", "entries/e/1"], ["rm", "entries"]])
def test_a_store_that_can_t_be_reached_is_no_empty_one(action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", unreachable(), *action]) == 2
    said = capsys.readouterr()
    assert re.search(r"moe-dist: store redis://127.0.0.1:\d+/0 can't be used: .*; `moe-dist doctor --store` checks one", said.err)
    assert "secret" not in said.err
    assert "in memory" not in said.err
    assert said.out == ""


KINDS = {  # of a store whose values lie in {0}
    "folder": "{0}",
    "file": "file://{0}",
    "read-only": "read-only:{0}",
    "layered": "layered:{0}/new,{0}",  # the local layer was never written
    "layered, older": "layered:{0}/old,{0}",  # it holds another value under a key of the shared one
    "layered, twice": "layered:{0}/new,layered:{0}/new2,{0}",
    "read-only of layered": "read-only:layered:{0}/new,{0}",
}
ACTIONS = {
    "ls": (["ls"], 0),
    "ls prefix": (["ls", "entries"], 0),
    "ls key": (["ls", "entries/e/1"], 0),
    "show": (["show", "epochs/d/00000001"], 0),
    "rm nothing": (["rm", "entries/nowhere"], 2),
}


def everything_in(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in Path(folder).rglob("*")}


@pytest.mark.parametrize("url", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("action", "code"), ACTIONS.values(), ids=ACTIONS)
def test_who_only_looks_leaves_the_store_as_it_was(url: str, action: list[str], code: int, folder: str) -> None:
    """Not even a dead writer's file goes, which a tuner's start removes."""
    FilesystemStore(f"{folder}/old").put("entries/e/1", b"older")
    (Path(folder) / "entries/e" / Path(new_temporary(folder)).name).write_bytes(b"dead")
    before = everything_in(folder)
    assert main(["store", "--store", url.format(folder), *action]) == code
    assert everything_in(folder) == before
    stored_epochs(url.format(folder))
    assert everything_in(folder) == before


def test_rm_removes_from_every_layer_and_makes_none(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    local = FilesystemStore(f"{folder}/local")
    for url in (f"layered:{folder}/new,{folder}", f"layered:{local.url},{folder}"):
        FilesystemStore(folder).put("entries/x/1", b"1")
        local.put("entries/x/2", b"2")
        assert main(["store", "--store", url, "rm", "entries/x"]) == 0
    assert capsys.readouterr().out == "removed 1 value at entries/x\nremoved 2 values at entries/x\n"
    assert local.list("") == FilesystemStore(folder).list("entries/x") == []
    assert not (Path(folder) / "new").exists()


@pytest.mark.parametrize("action", [["ls"], ["ls", "entries"], ["show", "entries/e/1"], ["rm", "entries"]], ids=" ".join)
@pytest.mark.parametrize("url", ["{}", "read-only:{}", "layered:{0}2,{0}", "read-only:layered:{0}2,{0}"])
def test_a_folder_that_is_not_there_is_no_empty_store(
    url: str, action: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "--store", url.format(tmp_path / "new"), *action]) == 2
    assert f"file://{tmp_path / 'new'}: there is no such folder; name another with --store" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_store_may_be_named_after_the_action(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOE_DIST_STORE", "/nosuch")
    assert main(["store", "ls", "--store", folder]) == 0
    assert main(["store", "--store", folder, "show", "entries/e/1"]) == 0
    assert main(["store", "rm", "entries", "--store", folder]) == 0
    assert capsys.readouterr().out.endswith("removed 2 values at entries\n")


def test_doctor_checks_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--store", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "written, read back and removed a value" in said
    assert "backend torch_grouped on cpu: runs a small bf16 layer" in said
    assert [*tmp_path.iterdir()] == [], "nothing that it made stays"
    assert main(["doctor", "--store", "/proc/nosuch"]) == 1
    assert re.search(
        r"store file:///proc/nosuch: does not keep what is written \(.+\); what is tuned would last .* name another with --store",
        capsys.readouterr().out,
    )
    # A store that dies with its process keeps nothing for the next one.
    assert main(["doctor", "--store", "memory:"]) == 1
    assert "store memory:: does not keep what is written (it lasts as long as its process)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nosuch"], "unknown model 'nosuch', .*pass its config.json or the folder that holds it"),
        (["--model", "olmoe-1b-7b", "--tp", "3"], "intermediate_size 1024 is not divisible by tp_size 3"),
        (["--model", "olmoe-1b-7b", "--ep", "3"], "num_experts 64 is not divisible by ep_size 3"),
        (["--tp", "0"], "argument --tp: '0' is no integer of at least 1"),
    ],
)
def test_doctor_recommends_nothing_that_tune_refuses(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--store", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr()
    assert re.search(f"^moe-dist: {message}", said.err)
    assert said.out == ""


def test_doctor_takes_a_model_that_tune_takes(tmp_path: Path) -> None:
    # Its routing can't be described: the printed command says --routed.
    assert main(["doctor", "--store", str(tmp_path), "--model", "phi-3.5-moe", "--tp", "2"]) == 0


def test_doctor_of_an_engine_is_told_what_the_engine_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Point:
        name = "engine"

        def load(self) -> Callable[..., list[str]]:
            return lambda store, model, tp, ep, max_tokens: [f"serve {model}"]

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    for given, served in (["--model", "OLMoE-1B-7B"], "allenai/OLMoE-1B-7B-0924"), ([], "None"):
        assert main(["doctor", "engine", "--store", str(tmp_path), *given]) == 0
        assert f"\nserve {served}\n" in capsys.readouterr().out
