"""A run of the tests draws the same Hypothesis examples as the last one, and `make test-random` other ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def draw() -> list[str | int]:
    drawn: list[str | int] = []

    @given(st.text(max_size=8) | st.integers())
    def keep(value: str | int) -> None:
        drawn.append(value)

    keep()
    return drawn


def test_examples_do_not_depend_on_what_else_a_worker_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not settings.default.derandomize:
        pytest.skip("this run asks for other examples each time")
    drawn = draw()
    module = tmp_path / "constants_of_ours.py"
    module.write_text("\n".join(f"A{number} = 'c{number}', {number + 70_000}" for number in range(100)))
    spec = importlib.util.spec_from_file_location(module.stem, module)
    monkeypatch.setitem(sys.modules, module.stem, importlib.util.module_from_spec(spec))
    assert draw() == drawn
    assert len(drawn) == settings.default.max_examples
