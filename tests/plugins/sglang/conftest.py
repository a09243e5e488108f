"""Everything here needs SGLang, from the environment that `make test-sglang` builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sglang_models as models
from sglang_engines import PROMPTS


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def truth(model: Path) -> list[dict[str, Any]]:
    return models.truth(model, PROMPTS)
