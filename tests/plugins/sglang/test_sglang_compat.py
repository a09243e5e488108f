"""An SGLang that lacks what the plugin relies on is named with the symbol, and gets no choice; what the doctor says."""

from __future__ import annotations

from pathlib import Path

import pytest
from moe_dist_sglang import register
from moe_dist_sglang.compat import NEEDS, SGLANG
from moe_dist_sglang.doctor import report
from source_tree import tree

from moe_dist.interop.source import Need, problems


def test_a_tree_that_has_everything_fits(tmp_path: Path) -> None:
    assert problems(tree(tmp_path, NEEDS), NEEDS, "sglang") == []


@pytest.mark.parametrize("missing", NEEDS, ids=lambda need: need.symbol)
def test_each_symbol_is_missed_by_name(missing: Need, tmp_path: Path) -> None:
    (said,) = problems(tree(tmp_path, tuple(need for need in NEEDS if need != missing)), NEEDS, "sglang") or [""]
    assert said.startswith(f"sglang.{missing.module}.{missing.symbol}: there is no")


def test_a_release_that_lacks_a_name_gets_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of SGLang is imported: what is read here is a folder without a line of its code."""
    lacking = tuple(need for need in NEEDS if need.symbol != "BaseRunner.warmup")
    monkeypatch.setattr("moe_dist.framework.package_root", lambda package: tree(tmp_path, lacking))
    words = (
        r"^moe_dist \S+ does not fit SGLang .+: .*BaseRunner\.warmup: there is no .*\. Use SGLang 0\.5\.20 to 0\.5\.23, .* left as it is"
    )
    with pytest.raises(RuntimeError, match=words):
        register()


def test_doctor_speaks_where_there_is_no_sglang_and_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_dist.framework.package_root", lambda package: None)
    for name in ("MOE_DIST_STORE", "MOE_DIST_TUNE", "MOE_DIST_UNSERVED"):
        monkeypatch.delenv(name, raising=False)
    lines = list(report(str(tmp_path), None, tp=2, ep=2, max_tokens=6))
    assert lines[0] == "sglang: not installed here"
    assert lines[1].startswith(f"settings: at start-up what the store lacks is measured (tune=tune); store {tmp_path}, budget 120 s, ")
    assert lines[2] == f"tuned: {tmp_path} holds no epoch of any SGLang deployment"
    assert "--moe-runner-backend moe_dist --tp 4 --ep 2 --chunked-prefill-size 6;" in lines[3]  # SGLang's --tp counts all ranks
    assert "torchrun --nproc-per-node=4 -m moe_dist.tune --model MODEL --tp 2 --ep 2 --routed --buckets 1,2,4,6 --policy eager" in lines[4]


@pytest.mark.parametrize(
    ("allowed", "said"), [("other", "keeps SGLang from loading it; add moe_dist"), ("other, moe_dist", "loads it"), ("", "loads it")]
)
def test_doctor_reads_the_list_of_plugins_as_sglang_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, said: str) -> None:
    monkeypatch.setattr("moe_dist.framework.package_root", lambda package: tree(tmp_path, NEEDS))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [_Point()])
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    lines = list(report(str(tmp_path / "store"), None, tp=1, ep=1, max_tokens=6))
    assert said in lines[1]
    assert lines[2].startswith("patched: the names of --moe-runner-backend")


class _Point:
    name = "moe_dist"


@pytest.mark.engine
def test_the_installed_sglang_fits_and_its_places_are_all_in_the_list() -> None:
    from moe_dist_sglang.hooks import PLACES

    assert SGLANG.misfit() is None
    assert set(PLACES) <= {f"sglang.{need.module}.{need.symbol}" for need in NEEDS}


def test_what_a_class_sets_on_itself_is_one_of_its_names(tmp_path: Path) -> None:
    """SGLang's dispatcher keeps there whether it maps expert ids; set on another object, or by a function, it is not its own."""
    (tmp_path / "module.py").write_text(
        "class Dispatcher:\n    def __init__(self, other):\n        if other:\n            self.skips = True\n        self.kept: int = 1\n        other.foreign = 2\n"
        "def function(self):\n    self.loose = 3\n"
    )
    names = ("skips", "kept", "foreign", "loose")
    found = problems(tmp_path, [Need("module", f"Dispatcher.{name}") for name in names], "package")
    assert found == [f"package.module.Dispatcher.{name}: there is no such name" for name in ("foreign", "loose")]
