"""A vLLM whose internals moved is named with the symbol, and left as it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from moe_dist_vllm.compat import NEEDS
from moe_dist_vllm.doctor import report
from source_tree import tree
from vllm_engines import environment

from moe_dist.interop.source import Need, problems


def test_a_tree_that_has_everything_fits(tmp_path: Path) -> None:
    assert problems(tree(tmp_path, NEEDS), NEEDS, "vllm") == []


@pytest.mark.parametrize("missing", NEEDS, ids=lambda need: need.symbol)
def test_each_symbol_is_missed_by_name(missing: Need, tmp_path: Path) -> None:
    (said,) = problems(tree(tmp_path, tuple(need for need in NEEDS if need != missing)), NEEDS, "vllm") or [""]
    assert said.startswith(f"vllm.{missing.module}.{missing.symbol}: there is no")


def test_changed_parameters_are_shown(tmp_path: Path) -> None:
    changed = tuple(
        Need(need.module, need.symbol, ("self", "M", "K")) if need.symbol.endswith("workspace_shapes") else need for need in NEEDS
    )
    (said,) = problems(tree(tmp_path, changed), NEEDS, "vllm")
    assert "FusedMoEExpertsModular.workspace_shapes: it takes (self, M, K), not (self, M, N, K, topk" in said


@pytest.mark.parametrize("branch", ["if True:", "if 0:\n    pass\nelse:", "try:\n    pass\nfinally:"])
def test_names_are_found_in_branches(branch: str, tmp_path: Path) -> None:
    # vLLM defines some names under `if TYPE_CHECKING` or in a `try`.
    path = tmp_path / "envs.py"
    tree(tmp_path, NEEDS)
    path.write_text(f"try:\n    pass\nexcept ImportError:\n    pass\n{branch}\n    VLLM_ENGINE_READY_TIMEOUT_S: int = 600\n")
    assert problems(tmp_path, NEEDS, "vllm") == []


@pytest.mark.engine
def test_the_installed_vllm_fits() -> None:
    import vllm

    assert problems(Path(vllm.__path__[0]), NEEDS, "vllm") == []


@pytest.mark.engine
@pytest.mark.timeout(200)
def test_a_moved_vllm_gets_one_error_and_no_patch(tmp_path: Path) -> None:
    """The installed vLLM with one function renamed, as a later release might: links to every other file."""
    import vllm

    real, root = Path(vllm.__path__[0]), tmp_path / "moved/vllm"
    moved = Path("model_executor/layers/fused_moe/oracle/fp8.py")
    for depth in range(len(moved.parts)):
        folder = Path(*moved.parts[:depth])
        (root / folder).mkdir(parents=True)
        for entry in (real / folder).iterdir():
            if entry.name != moved.parts[depth] and entry.name != "__pycache__":
                (root / folder / entry.name).symlink_to(entry)
    (root / moved).write_text((real / moved).read_text().replace("map_fp8_backend", "map_to_fp8_backend"))
    env = environment(tmp_path / "witness")
    env["PYTHONPATH"] = f"{tmp_path / 'moved'}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "nothing", "--moe-backend=moe_dist"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    (line,) = re.findall(r"moe_dist \S+ does not fit vLLM .*", said)
    assert (
        f"does not fit vLLM {vllm.__version__}: vllm.model_executor.layers.fused_moe.oracle.fp8.map_fp8_backend: there is no such name. Use vLLM 0.26 to 0.33, "
        in line
    )
    assert "invalid choice: 'moe_dist'" in said


def test_doctor_speaks_where_there_is_no_vllm_and_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("MOE_DIST_STORE", "MOE_DIST_TUNE", "MOE_DIST_UNSERVED"):
        monkeypatch.delenv(name, raising=False)
    lines = list(report(str(tmp_path), None, tp=2, ep=2, max_tokens=6))
    assert lines[0] == "vllm: not installed here"
    assert lines[1].startswith(f"settings: at start-up what the store lacks is measured (tune=tune); store {tmp_path}, budget 120 s, ")
    assert lines[2] == f"tuned: {tmp_path} holds no epoch of any vLLM deployment"
    # vLLM has one size for both: its experts are shared out over the ranks that tensor parallelism names.
    assert "--moe-backend=moe_dist --tensor-parallel-size=4 --enable-expert-parallel --max-num-batched-tokens=6;" in lines[3]
    assert "torchrun --nproc-per-node=4 -m moe_dist.tune --model MODEL --tp 2 --ep 2 --routed --buckets 1,2,4,6 --policy eager" in lines[4]


@pytest.mark.parametrize(
    ("allowed", "said"),
    [("other", "keeps vLLM from loading it; add moe_dist"), ("", "keeps vLLM from loading it"), ("a, moe_dist", "loads it")],
)
def test_doctor_reads_the_list_of_plugins_as_vllm_does(allowed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose empty list allows none."""
    monkeypatch.setattr("moe_dist.framework.package_root", lambda package: tree(tmp_path, NEEDS))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [SimpleNamespace(name="moe_dist")])
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    lines = list(report(str(tmp_path / "store"), None, tp=1, ep=1, max_tokens=6))
    assert said in lines[1]
    assert lines[2].startswith("patched: the names of --moe-backend")


def test_doctor_says_what_does_not_fit_shows_vllm_s_epochs_alone_and_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = tuple(need for need in NEEDS if need.symbol != "NEEDS_HELP")
    epochs = [SimpleNamespace(deployment=f"{name}:m:stage0", number=3, digest="0123456789", winners=()) for name in ("vllm", "sglang")]
    monkeypatch.setattr("moe_dist.framework.package_root", lambda package: tree(tmp_path, lacking))
    monkeypatch.setattr("moe_dist.framework.stored_epochs", lambda url: epochs)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    lines = list(report("redis://user:hunter2@127.0.0.1:1/3", "m", tp=1, ep=1, max_tokens=6))
    (patched,) = [line for line in lines if line.startswith("patched: ")]
    assert re.match(r"patched: nothing, since moe_dist \S+ does not fit vLLM .*arg_utils\.NEEDS_HELP: there is no such name", patched)
    assert [line.split(": epoch")[0] for line in lines if line.startswith("tuned: ")] == ["tuned: vllm:m:stage0"]
    assert "hunter2" not in "".join(lines)
    assert "MOE_DIST_STORE=URL vllm serve" in lines[-2]
