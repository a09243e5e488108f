"""The real vLLM on CPU with --moe-backend=moe_dist, on one rank: the stock backend's tokens, our experts executed, tuned once.

In float32, where greedy tokens of all layouts agree; where vLLM's fp8 knows no float32, in float16 beside the oracle in float16. All engines
run in one process, one after the other: a start is 10 s of imports, an engine in a process that has them 5 s.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import vllm_tiny
from vllm_engines import LEAST_CALLS, driver, executed, passed, summaries

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]  # of a machine where ten others work too; see the durations for a free one
FORMS = ("block", "tensor", "channel")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each came to, by name, in the order in which they ran."""
    folder = tmp_path_factory.mktemp("one_rank")
    plain, store = vllm_tiny.save_plain(folder / "plain"), str(folder / "store")
    # Of 46 seeds those whose two likeliest tokens are furthest apart: 0.043 and 0.024 at least, where float16 rounds logits by 0.01.
    fp8, other = (vllm_tiny.save_fp8(folder / str(seed), forms, seed) for seed, forms in ((11, FORMS), (15, FORMS[:2])))
    # Of 300 seeds likewise: 0.066 and 0.054 at least.
    loaded, other_loaded = (vllm_tiny.save_to_quantise(folder / f"to_quantise{seed}", seed) for seed in (26, 248))
    ours, half = {"model": plain, "backend": "moe_dist"}, {"dtype": "float16"}
    dense = {"quantization_config": {"ignore": ["re:.*self_attn.*", "re:.*mlp.gate"]}}
    online = {**ours, **half, **dense, "model": loaded, "reload": other_loaded}
    replay, brief = {"moe_dist": {"tune": "replay", "store": store}}, {"moe_dist": {"budget_s": 1e-4, "store": "memory:"}}
    asked: dict[str, dict[str, Any]] = {
        "stock": {"model": plain, "backend": "auto"},
        "stock copy": {"model": fp8["copy"], "backend": "auto"},
        "stock copy in half": {"model": fp8["copy"], "backend": "auto", **half},
        "stock other copy in half": {"model": other["copy"], "backend": "auto", **half},
        "cold": ours,
        "warm": {**ours, "reload": fp8["copy"]},
        "block": {**ours, "model": fp8["block"], "reload": other["block"], **half},
        "tensor": {**ours, "model": fp8["tensor"], "reload": other["tensor"], **half},
        "channel": {**ours, "model": fp8["channel"]},
        "stock to quantise": {"model": loaded, "backend": "auto", **half},
        "stock other to quantise": {"model": other_loaded, "backend": "auto", **half},
        "block when loaded": {**online, "quantization": "fp8_per_block"},
        "tensor when loaded": {**online, "quantization": "fp8_per_tensor"},
        "channel when loaded": {**online, "quantization": "fp8_per_channel", "additional_config": brief},
        "compiled": {**ours, "enforce_eager": False, "additional_config": replay, "environ": {"MOE_DIST_TUNE": "off"}},
        "refused": {**ours, "environ": {"WITNESS_REFUSE": "1", "MOE_DIST_UNSERVED": "native"}},
        "native": {**ours, "environ": {"WITNESS_NATIVE": "1", "MOE_DIST_TUNE": "off"}},
        "lora": {**ours, "enable_lora": True, "fails": True},
    }
    run = passed(driver(lambda: tmp_path_factory.mktemp("engine"))(*asked.values(), MOE_DIST_STORE=store, WITNESS_QUANTISE="1"))
    return dict(zip(asked, run.engines, strict=True))


def test_one_rank_gives_the_stock_tokens_with_our_experts(engines: dict[str, Any]) -> None:
    stock = engines["stock"]
    assert engines["cold"]["tokens"] == stock["tokens"]
    assert engines["warm"]["tokens"] == stock["tokens"]
    assert not executed(stock)  # the stock engine runs none of ours: the count can be 0
    assert [calls >= LEAST_CALLS for calls in executed(engines["cold"])] == [True]
    assert len({str(row) for row in stock["tokens"]}) > 1  # a model whose tokens are all alike would prove nothing


@pytest.mark.parametrize("form", FORMS)
def test_fp8_gives_the_tokens_of_its_dequantised_copy(form: str, engines: dict[str, Any]) -> None:
    """By block and by tensor as vLLM's own format has them, by channel as compressed-tensors does, in float32 there."""
    engine = engines[form]
    assert engine["tokens"] == engines["stock copy" if form == "channel" else "stock copy in half"]["tokens"]
    assert len({str(row) for row in engine["tokens"]}) > 1
    assert [calls >= LEAST_CALLS for calls in executed(engine)] == [True]
    assert f"fp8 by {form}" in engine["log"]
    assert summaries(engine["log"])[0][1] > 0  # each form is a problem of its own, so it is tuned


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_quantised_when_it_is_loaded_gives_the_tokens_of_what_it_means(form: str, engines: dict[str, Any]) -> None:
    """A checkpoint in bf16 under `--quantization fp8_per_tensor` and the like, drawn so that nothing is lost: stock serves it as it is. Reloaded, too."""
    engine, stock = engines[f"{form} when loaded"], engines["stock to quantise"]
    assert engine["tokens"] == stock["tokens"]
    assert engine["reloaded"] == engines["stock other to quantise"]["tokens"] != stock["tokens"]
    assert len({str(row) for row in engine["tokens"]}) > 1
    assert [calls >= LEAST_CALLS for calls in executed(engine)] == [True]
    assert f"fp8 by {form}" in engine["log"]


def test_second_start_measures_nothing(engines: dict[str, Any]) -> None:
    ((cold, timed),), ((warm, timed_again),) = (summaries(engines[name]["log"]) for name in ("cold", "warm"))
    assert timed > 0
    assert re.search(r"tuning 1 of \d+: ", engines["cold"]["log"])
    assert not re.search(r"tuning \d+ of \d+: ", engines["warm"]["log"])
    assert timed_again == 0
    assert cold == warm


def test_where_the_budget_ends_the_default_serves_and_the_log_says_so(engines: dict[str, Any]) -> None:
    log = engines["channel when loaded"]["log"]
    assert "are out: the time budget ended before it was timed to the end" in log
    assert re.search(r"fp8 by channel, .*: eager 1-64: \w+\(.*\) \[default\]", log)


def test_second_start_takes_under_a_second(engines: dict[str, Any]) -> None:
    """The quicker of two that measure nothing: the other work of this machine may hold one up."""
    took = [float(re.findall(r" 0 candidates timed; \w+ took ([\d.]+) s", engines[name]["log"])[0]) for name in ("warm", "compiled")]
    assert min(took) < 1


def test_one_line_says_what_serves_each_bucket_and_where_it_came_from(engines: dict[str, Any]) -> None:
    pattern = r"\] (2 x \(8 experts top-2, hidden 128, intermediate 64, fp32, tp 1 ep 1\), first model\.layers\.0\..*)"
    (cold,), (warm,) = (re.findall(pattern, engines[name]["log"]) for name in ("cold", "warm"))  # one distinct shape
    assert "[tuned now]" in cold
    assert "[store]" not in cold
    assert "[tuned now]" not in warm
    # 64 tokens a step at most: every power of two up to it, some of them merged where one tactic serves neighbours.
    assert re.search(r"eager 1(-\d+)?: ", cold)
    assert re.search(r"[ -]64: ", cold)


def test_compiled_engine_replays_what_the_store_has(engines: dict[str, Any]) -> None:
    """The eager engine's store serves it, as the engine's own config asks, which goes before the environment."""
    compiled = engines["compiled"]
    assert compiled["tokens"] == engines["stock"]["tokens"]
    assert [calls >= LEAST_CALLS for calls in executed(compiled)] == [True]
    assert summaries(compiled["log"]) == [(summaries(engines["cold"]["log"])[0][0], 0)]  # the epoch of before
    assert re.search(r"0 candidates timed; replay took", compiled["log"])


def test_reloaded_weights_are_served(engines: dict[str, Any]) -> None:
    """vLLM writes them into the layers' own storage, scales as well; what was tuned goes on serving."""
    for ours, stock in (("warm", "stock copy"), ("block", "stock other copy in half"), ("tensor", "stock other copy in half")):
        assert engines[ours]["reloaded"] == engines[stock]["tokens"] != engines[ours]["tokens"], ours
        assert len(summaries(engines[ours]["log"])) == 1  # and nothing is tuned anew


def test_lora_adapters_end_start_up_with_the_reason(engines: dict[str, Any]) -> None:
    reason = "moe_backend='moe_dist' can't serve this layer: it does not run LoRA adapters; choose another --moe-backend"
    assert engines["lora"]["error"].startswith(f"ValueError: {reason}")


def test_layers_that_we_do_not_serve_run_vllm_s_own_experts_where_that_is_set(engines: dict[str, Any]) -> None:
    refused = engines["refused"]
    assert refused["tokens"] == engines["stock"]["tokens"]
    assert not executed(refused)
    said = "moe_dist leaves layers to vLLM's own experts: Unquantized MoE backend moe_dist does not support .* does not serve this layer, says the test"
    assert len(re.findall(said, refused["log"])) == 1  # of two layers alike
    assert re.search(r"0 layers serve epoch .* 0 candidates timed", refused["log"])


def test_vllm_s_own_experts_are_the_default_tactic(engines: dict[str, Any]) -> None:
    """Tuning is off, so what serves is the default: not ours, though ours are there."""
    native = engines["native"]
    assert native["tokens"] == engines["stock"]["tokens"]
    assert "eager 1-64: vllm(experts=PlainExperts) [default]" in native["log"]
    assert "2 layers run the defaults: tuning is off" in native["log"]


def test_own_experts_that_need_a_second_copy_are_left_out_aloud(engines: dict[str, Any]) -> None:
    # 8 experts x 3 x 64 x 128 values of 4 bytes. vLLM's CPU experts pack the weights anew.
    said = "vLLM's auto would run CPUUnquantizedExperts here, which lays the experts' weights out anew: .* a second copy of 0.8 MiB a layer"
    assert re.search(said, engines["cold"]["log"])
