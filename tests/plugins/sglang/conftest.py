"""Everything here needs SGLang, from the environment that `make test-sglang` builds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_models as models
from sglang_engines import PROMPTS, Engines
from sglang_stand_ins import settings_of


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def truth(model: Path) -> list[dict[str, Any]]:
    return models.truth(model, PROMPTS)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("engines")) as engines:
        yield engines


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine publishes to its processes before it builds a layer."""
    from moe_dist_sglang import layers, runner

    monkeypatch.setattr(layers, "get_lora", lambda: SimpleNamespace(enable_lora=False, lora_paths=None))
    monkeypatch.setattr(layers, "get_exec", lambda: settings_of())
    monkeypatch.setattr(runner, "get_parallel", lambda: SimpleNamespace(tp_group=None))
    monkeypatch.setattr(runner, "is_allocation_symmetric", lambda: False)
    monkeypatch.setattr(runner, "use_symmetric_memory", lambda group, disabled: contextlib.nullcontext())
