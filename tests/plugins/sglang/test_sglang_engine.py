"""The real engine, on CPU: it says what Hugging Face's model says, our core said it, and nothing else ever serves in silence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest
from engines import PROMPTS, environment, post, run_engine, run_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LAYERS = 2
STEPS = models.NEW_TOKENS  # forward passes: one for the prompts together, one for each further token


def require_equal(results: Sequence[dict[str, Any]], truth: Sequence[dict[str, Any]], within: float) -> None:
    assert len(results) == len(truth)
    for result, true in zip(map(models.answer, results), truth, strict=True):
        assert result["tokens"] == true["tokens"]
        assert result["logprobs"] == pytest.approx(true["logprobs"], abs=within)


def test_server_answers_as_the_model(tmp_path: Path, model: Path, truth: list[dict[str, Any]]) -> None:
    with run_server(tmp_path, model, environment(tmp_path)) as (url, _):
        results = post(
            f"{url}/generate",
            {
                "input_ids": PROMPTS,
                "sampling_params": {"temperature": 0, "max_new_tokens": models.NEW_TOKENS, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
    require_equal(results, truth, 1e-4)
    (counts,) = [path.read_text() for path in (tmp_path / "counts").iterdir()]
    assert counts == f"core={LAYERS * STEPS} native=0"


# Tensor parallel alone cuts every expert; expert parallel on top leaves experts whole, on one rank each.
@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks_answer_as_the_model(tmp_path: Path, model: Path, truth: list[dict[str, Any]], ep_size: int) -> None:
    ended = run_engine(tmp_path, model, environment(tmp_path), tp_size=2, ep_size=ep_size)
    assert ended.results, ended.log[-3000:]
    require_equal(ended.results, truth, 1e-4)
    assert ended.counts == ({"core": LAYERS * STEPS, "native": 0},) * 2


def test_block_fp8_experts_answer_as_their_dequantised_copy(tmp_path: Path, model: Path, truth: list[dict[str, Any]]) -> None:
    quantised, plain = models.make_fp8_copy(model, tmp_path / "copies")
    ended = run_engine(tmp_path, quantised, environment(tmp_path), dtype="float16")  # SGLang takes fp8 with 16-bit activations only
    assert ended.results, ended.log[-3000:]
    dequantised = models.truth(plain, PROMPTS)
    assert [answer["tokens"] for answer in dequantised] != [answer["tokens"] for answer in truth]  # fp8 shows
    require_equal(ended.results, dequantised, 0.02)
    assert ended.counts == ({"core": LAYERS * STEPS, "native": 0},)


def test_without_the_plugin_the_choice_is_refused(tmp_path: Path, model: Path) -> None:
    ended = run_engine(tmp_path, model, environment(tmp_path, SGLANG_PLUGINS="moe_dist_cpu"))
    assert not ended.results
    assert ended.returncode != 0
    assert "MoE runner backend 'moe_dist' is neither built in nor registered" in ended.log


def test_without_the_choice_the_plugin_changes_nothing(tmp_path: Path, model: Path, truth: list[dict[str, Any]]) -> None:
    ended = run_engine(tmp_path, model, environment(tmp_path), moe_runner_backend="auto")
    assert ended.results, ended.log[-3000:]
    require_equal(ended.results, truth, 1e-4)
    assert ended.counts == ({"core": 0, "native": LAYERS * STEPS},)


def test_a_plugin_that_fails_at_import_is_no_choice(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken" / "moe_dist_sglang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libnothing.so.1: cannot open shared object file')\n")
    environ = environment(tmp_path)
    ended = run_engine(tmp_path, model, environ | {"PYTHONPATH": f"{broken.parent}:{environ['PYTHONPATH']}"})
    assert not ended.results
    assert ended.returncode != 0
    assert "Failed to load plugin moe_dist" in ended.log
    assert "MoE runner backend 'moe_dist' is neither built in nor registered" in ended.log


def test_a_layer_with_another_runner_ends_start_up(tmp_path: Path, model: Path) -> None:
    """Some other plugin, or a release of SGLang that goes another way, gives a layer Triton after all."""
    ended = run_engine(tmp_path, model, environment(tmp_path, MOE_DIST_TEST_STEAL="1"))
    assert not ended.results
    assert ended.returncode != 0
    assert "model.layers.1.mlp.experts: SGLang gave it the runner" in ended.log
    assert ended.counts == ()
