"""The tests marked `engine` run under the interpreter of an environment that has vLLM (`make test-vllm`), and are skipped elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engine") and Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; run make test-vllm"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE model, drawn."""
    return vllm_tiny.save_plain(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def plugins() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The vLLM config that a worker would have set; indirect parameter: --additional-config's "moe_dist"."""
    from vllm.config import VllmConfig, set_current_vllm_config

    monkeypatch.delenv("MOE_DIST_UNSERVED", raising=False)
    with set_current_vllm_config(VllmConfig(additional_config={"moe_dist": getattr(request, "param", {})})):
        yield
