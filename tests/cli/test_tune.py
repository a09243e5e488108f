"""The launcher: what it refuses before any rank works, what becomes of its store, how ranks are laid out, and what a signal waits for."""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from moe_dist.cli.main import build_parser, main
from moe_dist.cli.tune import Interrupted, _Interrupts, plan_job
from moe_dist.cli.tune_report import _rounded_up
from moe_dist.errors import ConfigError, UnsupportedBackend
from moe_dist.settings import RankSettings
from moe_dist.stores.codec import decode_epoch
from moe_dist.stores.degrade import Unavailable
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning.adoption import choose_committed
from moe_dist.tuning.problem import digest

WRITE = FilesystemStore._write


def parsed(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["tune", "--device", "cpu", *arguments])


# -- refused before any rank starts work ---------------------------------------------------------------------------------

REFUSED: list[tuple[list[str], int, str]] = [
    (["--model", "qwen3-31b"], 1, "unknown model 'qwen3-31b', and no such file or folder in /.+; close names: qwen3-30b-a3b"),
    (["--model", "olmoe-1b-7b", "--ep", "3"], 3, r"num_experts 64 is not divisible by ep_size 3; .*--allow-uneven"),
    (["--model", "olmoe-1b-7b", "--tp", "3"], 3, "intermediate_size 1024 is not divisible by tp_size 3"),
    (["--model", "olmoe-1b-7b", "--ep", "2"], 1, r"--tp 1 x --ep 2 needs 2 ranks, but 1 was started; use torchrun --nproc-per-node 2"),
    (
        ["--model", "olmoe-1b-7b", "--ep", "2"],
        3,
        r"--ep 2 needs 2 ranks, but 3 were started; use torchrun --nproc-per-node 2 -m moe_dist.tune$",
    ),
    (
        ["--model", "olmoe-1b-7b"],
        2,
        r"^--tp 1 x --ep 1 needs 1 rank, but 2 were started; for all 2 give --ep 2 or --tp 2, or --dp 2 to tune replicas "
        r"apart; or use torchrun --nproc-per-node 1 -m moe_dist.tune$",
    ),
    (["--model", "olmoe-1b-7b", "--ep", "2"], 4, r"but 4 were started; for all 4 give --ep 4 or --tp 2, or --dp 2 to tune"),
    (["--model", "olmoe-1b-7b", "--policy", "cuda_graph"], 1, "policy 'cuda_graph' needs a CUDA device, not 'cpu'; choose 'eager'"),
    (["--model", "phi-3.5-moe"], 1, "sparsemixer.*--routed"),
    (["--model", "olmoe-1b-7b", "--json", "."], 1, "--json '.' is a folder; name a file"),
    (["--model", "olmoe-1b-7b", "--seed", "-1"], 1, "^the seed of probes is -1; choose one from 0 to 4294967295$"),
    (
        ["--model", "olmoe-1b-7b", "--cap", "10", "--progress-timeout", "60"],
        1,
        "^--progress-timeout 60 exceeds --cap 10, which would end every pass first; raise --cap, or lower --progress-timeout$",
    ),
    (["--model", "olmoe-1b-7b", "--progress-timeout", "1201"], 1, "^--progress-timeout 1201 exceeds --cap 1200, "),
    (["--model", "olmoe-1b-7b", "--seed", "4294967296"], 1, "^the seed of probes is 4294967296; choose one from 0 to 4294967295$"),
]


@pytest.mark.parametrize(("arguments", "world_size", "message"), REFUSED)
def test_wrong_arguments_are_refused(arguments: list[str], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_job(parsed(*arguments), RankSettings(world_size=world_size))


@pytest.mark.parametrize(
    ("arguments", "seconds"), [("", 60), ("--cap 10", 10), ("--cap 10 --progress-timeout 10", 10), ("--progress-timeout 1200", 1200)]
)
def test_no_rank_is_waited_for_past_the_cap(arguments: str, seconds: int) -> None:
    job = plan_job(parsed("--model", "olmoe-1b-7b", "--store", "memory:", *arguments.split()), RankSettings())
    assert job.progress_timeout.total_seconds() == seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--ep", "0"], "argument --ep: '0' is no integer of at least 1"),
        (["--model", "m", "--buckets", "1,b"], "argument --buckets: 'b' is no integer of at least 1"),
        (["--model", "m", "--buckets", "8:2"], "argument --buckets: '8:2' falls; write the smaller token count first"),
        (["--model", "m", "--buckets", "1", "--max-tokens", "9"], "argument --max-tokens: not allowed with argument --buckets"),
        (["--model", "m", "--budget", "nan"], "argument --budget: 'nan' is no number of seconds above 0"),
        (["--model", "m", "--cap", "-1"], "argument --cap: '-1' is no number of seconds above 0"),
        (["--model", "m", "--dtype", "bf61"], "argument --dtype: invalid choice: 'bf61'"),
        ([], "the following arguments are required: --model"),
        (["--model", "m", "--frob", "3"], "^unknown flag --frob"),
        (["--model", "m", "--progress", "3"], r"^unknown flag --progress; did you mean --progress-timeout\?"),  # a flag is written out
        (["--modle", "x"], r"^unknown flag --modle; did you mean --model\?"),  # not that --model is missing
        (["--model", "m", "--sede=3"], r"^unknown flag --sede; did you mean --seed\?"),
        (["--model", "m", "stray"], "^unrecognized arguments: stray"),
        (["--model", "redis://:s3cr3t@h/0"], "^argument --model: it is a URL, which can't be; a store's goes to --store"),
        (["--model", "m", "--json=redis//:s3cr3t@h/0"], "^argument --json: it is a URL"),
        (["--model", "m", "--deployment", "rediss://s3cr3t@h"], "^argument --deployment: it is a URL"),
    ],
)
def test_unparsable_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*; moe-dist tune --help lists what there is") as refused:
        parsed(*arguments)
    assert "s3cr3t" not in str(refused.value)


def test_the_help_says_how_long_ranks_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parsed("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "a rank is lost (default 60)" in said
    assert "may take in all (default 1200)" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 needs GPU 0, but torch sees 0 on this host; .*--device cpu"):
        plan_job(parsed("--model", "olmoe-1b-7b", "--device", "cuda"), RankSettings())


def test_format_that_no_backend_runs() -> None:
    with pytest.raises(UnsupportedBackend, match=r"torch_grouped.*not mxfp4"):
        plan_job(parsed("--model", "gpt-oss-20b"), RankSettings())


def test_store_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cpu", "--model", "olmoe-1b-7b", "--store", "ftp://host"]) == 2
    said = capsys.readouterr()
    assert "moe-dist: store scheme 'ftp:' is unknown" in said.err
    assert not said.out


UNUSABLE = [
    "/proc/nosuch",
    "read-only:redis://:secret@127.0.0.1:1/0",
    "redis://:secret@127.0.0.1:1/0",
    "layered:/tmp,redis://127.0.0.1:1/0",
]


@pytest.mark.parametrize("url", UNUSABLE)
def test_a_store_that_keeps_nothing_is_refused_before_anything_is_measured(
    url: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url.replace("/tmp", str(tmp_path / "local"))
    assert main(["tune", "--device", "cpu", "--model", model, "--buckets", "1", "--store", url]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"^moe-dist: store \S+ can't be used: .+; mend it .*, name another with --store, or .* --store memory:", said.err)
    assert "in memory" not in said.err
    assert "secret" not in said.err


def test_memory_is_a_store_that_was_asked_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cpu", "--model", model, "--buckets", "1", "--store", "memory:"]) == 0
    assert "kept nowhere (memory: lasts as long as its process)" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_narrow_terminal_breaks_tactics_over_lines_and_no_figure(columns: int, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    assert main(["tune", "--device", "cpu", "--model", model, "--buckets", "8,16", "--store", "memory:"]) == 0
    said = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert "…" not in said
    head, *lines = said[said.index("tokens ") :].splitlines()
    assert head.split() == ["tokens", "default", "us", "winner", "us", "gain", "source"]
    assert max(map(len, lines[:-1])) <= columns
    rows = [line for line in lines if re.match(r" *(1-8|9-16) ", line)]
    assert len(rows) == 2
    assert all(re.search(r" \d+\.\d  \S+ +\d+\.\d  \d+\.\d\dx  tuned *$", row) for row in rows)
    assert "\n".join(lines[:-1]).count(")") == 4, "every tactic has its end"


def test_a_budget_that_ends_before_anything_is_timed_is_no_success(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every pass has its first look, and the budget is over: nothing wins, and no epoch hides one that has winners."""
    asked = ["tune", "--device", "cpu", "--model", model, "--buckets", "1,2", "--store", str(tmp_path / "store")]
    assert main([*asked, "--budget", "1e-5"]) == 1
    said = capsys.readouterr()
    assert re.search(r"^moe-dist: 1 of 2 cells, \d+ s: [1-9]\d* candidates timed at 1 tokens, none to the end$", said.err, re.MULTILINE)
    assert re.search(
        r"^moe-dist: 2 of 2 cells have no winner \(eager at 1, 2 tokens\): the budget of 1e-05 s, an equal share for each of 2 buckets, ended before a candidate was timed "
        r"to the end; give --budget [1-9]\d*, or none$",
        said.err,
        re.MULTILINE,
    )
    assert re.search(
        r"^measured [1-9]\d* candidates, 0 hits of 2; 2 without a winner; one rank; .* s; no winner to keep$", said.out, re.MULTILINE
    )
    assert FilesystemStore(tmp_path / "store").list("") == []
    assert main([*asked, "--strategy", "reload", "--budget", "1e-5"]) == 1, "no time for any candidate"
    said = capsys.readouterr()
    assert re.search(r"^measured 0 candidates, 0 hits of 2; 2 without a winner; .*; no winner to keep$", said.out, re.MULTILINE)
    assert "timed to the end; give more, or none\n" in said.err
    assert main(asked) == 0
    assert "without a winner" not in capsys.readouterr().out
    assert len(FilesystemStore(tmp_path / "store").list("epochs")) >= 1


@pytest.mark.parametrize(("number", "rounded"), [(0.2, 1), (7, 7), (99.5, 100), (101, 110), (1234, 1300)])
def test_a_budget_is_rounded_up(number: float, rounded: int) -> None:
    assert _rounded_up(number) == rounded


def test_a_store_that_dies_while_tuning_costs_the_exit_code_and_not_the_winners(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FilesystemStore, "_write", _full_after_the_check)
    report = tmp_path / "report.json"
    asked = ["tune", "--device", "cpu", "--model", model, "--buckets", "1,2", "--store", str(tmp_path / "store"), "--json", str(report)]
    assert main(asked) == 1
    said = capsys.readouterr()
    assert said.out.count("tuned") == 2, "the winners are printed"
    assert said.out.rstrip().endswith("kept nowhere (epoch 2 is not there)")
    assert f"moe-dist: the winners are not kept in file://{tmp_path / 'store'}: epoch 2 is not there" in said.err
    assert json.loads(report.read_text())["not_kept"] == "epoch 2 is not there"
    url = f"file://{tmp_path / 'store'}"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("moe_dist")] == [
        f"store {url}: no space left. Going on in memory: what it does not take before this process ends is lost.",
        f"epoch 1 could not be published to {url}: nobody can join until it is, or a later one",  # and not for every bucket
    ]


def _full_after_the_check(store: FilesystemStore, key: str, value: bytes) -> None:
    if not key.startswith("doctor-"):
        raise Unavailable("no space left.")
    WRITE(store, key, value)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("4,1,16", (1, 4, 16)),
        ("1:8", (1, 2, 4, 8)),
        ("3:20", (3, 4, 8, 16, 20)),  # ends that are no powers of two are kept
        ("1:4,6,6", (1, 2, 4, 6)),
        ("5:5", (5,)),
    ],
)
def test_buckets(text: str, bounds: tuple[int, ...]) -> None:
    assert plan_job(parsed("--model", "olmoe-1b-7b", "--buckets", text), RankSettings()).ladder.bounds == bounds


def test_results_that_could_not_be_written_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in (
        (str(tmp_path / "file"), f": the folder '{tmp_path}/file' is no folder; make it, or name another place"),
        (f"{tmp_path}/new/folder", f": the folder '{tmp_path}/new/folder' does not exist; make it, or name another place"),
        ("/proc", " can't be written: '/proc/out.json': .+; name another place"),  # root may write everywhere, and still not there
    ):
        with pytest.raises(ConfigError, match=f"--json '{place}/out.json'{why}"):
            plan_job(parsed("--model", "olmoe-1b-7b", "--json", f"{place}/out.json"), RankSettings())
    assert not (tmp_path / "new").exists()


def test_a_stage_and_a_replica_are_groups_of_their_own() -> None:
    asked = parsed("--model", "olmoe-1b-7b", "--ep", "2", "--pp", "2", "--dp", "2")
    assert plan_job(asked, RankSettings(rank=5, world_size=8)).place.group == (4, 5)
    with pytest.raises(
        ConfigError, match=r"--tp 1 x --ep 2 x --pp 2 x --dp 2 needs 8 ranks, but 2 were started; use torchrun --nproc-per-node 8"
    ):
        plan_job(asked, RankSettings(world_size=2))


def test_ranks_that_cut_an_expert_are_neighbours() -> None:
    jobs = [
        plan_job(parsed("--model", "olmoe-1b-7b", "--tp", "2", "--ep", "2"), RankSettings(rank=rank, world_size=4)).place
        for rank in range(4)
    ]
    assert [(job.ep_rank, job.tp_rank) for job in jobs] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_another_model_s_winners_stay_in_the_deployment_beside_these(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A group of one, in this process: the same passes, with nobody to wait for.
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(Path(model).read_text()) | {"num_experts": 4}))
    store = FilesystemStore(tmp_path / "store")
    problems = set()
    for which in (model, str(other)):
        with caplog.at_level(logging.WARNING):
            assert main(["tune", "--device", "cpu", "--model", which, "--buckets", "1,2", "--store", str(tmp_path / "store")]) == 0
        assert "not adopted" not in caplog.text, "nothing is wrong with tuning a second model"
        newest = decode_epoch(store.get(max(store.list("epochs"))) or b"")[0]
        problems |= {cell.problem for cell in newest.winners}
    assert len(problems) == 2
    for problem in problems:
        found, reason = choose_committed(store, "default", {digest(problem.packed)})
        assert found is not None, reason
        assert (len(found.epoch.of(problem, "eager")), len(found.epoch.winners), len(found.entries)) == (2, 2, 2)


def test_a_signal_between_commit_and_report_waits_for_the_report_and_a_second_does_not() -> None:
    interrupts = _Interrupts()
    interrupts.held = True
    interrupts(signal.SIGINT, None)  # nothing is raised
    with pytest.raises(Interrupted, match="SIGINT"):
        interrupts.check()
    interrupts(signal.SIGINT, None)  # on the way out: nothing again
    interrupts = _Interrupts()
    interrupts.held = True
    interrupts(signal.SIGINT, None)
    with pytest.raises(Interrupted, match="SIGTERM"):
        interrupts(signal.SIGTERM, None)
    with pytest.raises(Interrupted, match="SIGTERM"):
        _Interrupts()(signal.SIGTERM, None)
