"""SGLang's layer with its own experts beside ours, as on a card but eagerly and in a small shape: real layer, start-up and tuning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_engines import environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SMALL = """
import sys
import moe_dist_sglang.bench as bench
from moe_dist.bench.kernel_inputs import Shape
bench.SHAPES = (Shape("small", 8, 2, 128, 128, ("bf16",)),)
sys.exit(bench.main(sys.argv[1:]))
"""


def test_missing_rows_are_taken_and_right(tmp_path: Path) -> None:
    """The cell that the file holds stays as it is; fp8 and graphs need a card."""
    rows = tmp_path / "rows.json"
    held = {"shape": "small", "dtype": "bf16", "tokens": 1, "mode": "eager", "sglang_us": 7.0}
    rows.write_text(json.dumps({"core": [held]}))
    command = [sys.executable, "-c", SMALL, "--json", str(rows), "--device", "cpu", "--tokens", "1", "16", "64"]
    ran = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads(rows.read_text())
    kept, taken = document["core"]
    assert kept == held
    assert (taken["shape"], taken["dtype"], taken["tokens"], taken["mode"]) == ("small", "bf16", 16, "eager")  # 64 tokens: graphs alone
    assert taken["ratio"] == pytest.approx(taken["sglang_us"] / taken["ours_us"], rel=1e-3)
    assert 0 < taken["ours_error"] < 0.01  # of bf16 sums; two different experts would be off by 1.4
    assert 0 < taken["sglang_error"] < 0.01
    assert taken["tactic"].startswith(("torch_", "sglang("))
    assert document["command"] == "python -m moe_dist_sglang.bench --tokens 1 16 64"
    assert document["versions"]["sglang"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "rows.json"], "--device cuda: torch sees no CUDA device in this process; --device cpu"),
        (["--device", "cpu", "--json", "absent/rows.json"], "--json absent/rows.json: there is no folder absent; make it first"),
    ],
)
def test_what_cannot_run_is_refused_before_sglang_starts(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_dist_sglang import bench

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "start_sglang", None)
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
