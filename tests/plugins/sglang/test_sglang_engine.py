"""The real engine, on CPU: it says what Hugging Face's model says, our core said it, and nothing else ever serves in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sglang_models as models
from sglang_engines import PROMPTS, START_S, Ended, Engines, environment, post, run_server, run_spawned_engine

from moe_dist.serving import stored_epochs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * START_S + 60)]

LAYERS = 2
STEPS = models.NEW_TOKENS  # forward passes: one for the prompts together, one for each further token


def require_equal(results: Sequence[dict[str, Any]], truth: Sequence[dict[str, Any]], within: float) -> None:
    assert len(results) == len(truth)
    for result, true in zip(map(models.answer, results), truth, strict=True):
        assert result["tokens"] == true["tokens"]
        assert result["logprobs"] == pytest.approx(true["logprobs"], abs=within)


def test_server_answers_as_the_model(tmp_path: Path, model: Path, truth: list[dict[str, Any]]) -> None:
    """Untuned, so that every call of our core runs the default: SGLang's own experts."""
    with run_server(tmp_path, model, environment(tmp_path, MOE_DIST_TUNE="off")) as (url, log):
        results = post(
            f"{url}/generate",
            {
                "input_ids": PROMPTS,
                "sampling_params": {"temperature": 0, "max_new_tokens": models.NEW_TOKENS, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
        said = log.read_text()
    require_equal(results, truth, 1e-4)
    (counts,) = [path.read_text() for path in (tmp_path / "counts").iterdir()]
    assert counts == f"core={LAYERS * STEPS} native={LAYERS * STEPS}"
    assert "first model.layers.0.mlp.experts: eager 1-16: sglang(runner=torch) [default]" in said
    assert f"{LAYERS} layers run the defaults: tuning is off" in said


def epochs(ended: Ended, store: str) -> list[tuple[str, str]]:
    """(epoch, candidates timed) of each rank, as its log says."""
    return ended.found(rf"{LAYERS} layers serve epoch (\d+ \(\w+\)) of {store}; (\d+) candidates timed")


def test_tensor_parallel_ranks_tune_together_and_answer_as_the_model(
    engines: Engines, tmp_path: Path, model: Path, truth: list[dict[str, Any]]
) -> None:
    """Its second layer asks for a weighted row a slot (`no_combine`), which the model sums."""
    ended = engines.run(tmp_path, model, environment(tmp_path, MOE_DIST_TEST_ROWS="1"), tp_size=2)
    assert ended.results, ended.log[-3000:]
    require_equal(ended.results, truth, 1e-4)
    assert [(counts["core"], counts["rows"]) for counts in ended.counts] == [(LAYERS * STEPS, STEPS)] * 2
    (epoch, measured), other = epochs(ended, "memory:")
    assert (epoch, measured) == other
    assert epoch.startswith("1 ")
    assert int(measured) > 0


def test_expert_parallel_ranks_measure_nothing_at_their_second_start(
    engines: Engines, tmp_path: Path, model: Path, truth: list[dict[str, Any]]
) -> None:
    """The second one's routers leave their work to the runner (bypassed), which no key and no answer shows."""
    store = str(tmp_path / "store")
    starts = []
    for start, run, form in (("cold", run_spawned_engine, {}), ("warm", engines.run, {"MOE_DIST_TEST_TOPK": "bypassed"})):
        folder = tmp_path / start
        folder.mkdir()
        ended = run(folder, model, environment(folder, store, **form), tp_size=2, ep_size=2)
        assert ended.results, ended.log[-3000:]
        require_equal(ended.results, truth, 1e-4)
        assert [counts["core"] for counts in ended.counts] == [LAYERS * STEPS] * 2
        assert [counts.get("bypassed", 0) for counts in ended.counts] == [LAYERS * STEPS if form else 0] * 2
        starts.append(epochs(ended, store))
    cold, warm = starts
    assert len(set(cold)) == len(set(warm)) == 1
    assert len(cold) == len(warm) == 2
    assert int(cold[0][1]) > 0
    assert warm[0] == (cold[0][0], "0")  # the same table, and nothing timed


@pytest.mark.parametrize(("granularity", "form"), [("block", "packed"), ("tensor", None)])  # form: of the router's output
def test_fp8_experts_answer_as_their_dequantised_copy(
    engines: Engines, tmp_path: Path, model: Path, truth: list[dict[str, Any]], granularity: str, form: str | None
) -> None:
    quantised, plain = models.make_fp8_copy(model, tmp_path / "copies", granularity)
    environ = environment(tmp_path, **({"MOE_DIST_TEST_TOPK": form} if form else {}))
    ended = engines.run(tmp_path, quantised, environ, dtype="float16")  # SGLang takes fp8 with 16-bit activations only
    assert ended.results, ended.log[-3000:]
    dequantised = models.truth(plain, PROMPTS)
    require_equal(ended.results, dequantised, 0.02)
    with pytest.raises(AssertionError):  # fp8 shows
        require_equal(ended.results, truth, 0.02)
    counted = {"core": LAYERS * STEPS, "native": 0}  # SGLang has no fp8 experts on a CPU: all of it is ours
    assert ended.counts == (counted | ({form: LAYERS * STEPS} if form else {}),)
    assert int(epochs(ended, "memory:")[0][1]) > 0


def test_attention_data_parallel_ranks_tune_together(engines: Engines, tmp_path: Path, model: Path) -> None:
    """One group of attention data parallelism and expert parallelism, whose layers see the rows of both ranks.

    Nothing is asked: to gather rows SGLang launches Triton, which no CPU runs. Its start, warm-up included, is the real one.
    """
    ended = engines.run(tmp_path, model, environment(tmp_path), (), tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True)
    first, second = epochs(ended, "memory:")
    assert first == second
    assert int(first[1]) > 0
    assert ended.returncode == 0, ended.log[-3000:]


@pytest.mark.parametrize(
    ("make", "card", "parallel"),
    [
        (models.make_glm, (), {}),  # the factor: the model's; the shared expert: a module of the model's
        (models.make_deepseek_v2, ("SCALE",), {"tp_size": 2, "ep_size": 2}),  # the factor: our core's
        (models.make_deepseek_v3, ("SCALE", "FUSE"), {}),  # the shared expert: a slot of each token more, whose weight the factor makes 1
    ],
    ids=["glm", "deepseek_v2", "deepseek_v3"],
)
def test_scaled_grouped_routing_with_a_shared_expert(
    engines: Engines, tmp_path: Path, make: Callable[[Path], Path], card: Sequence[str], parallel: dict[str, int]
) -> None:
    """card: what the model does as on a card, see `cpu/moe_dist_cpu.py`."""
    model = make(tmp_path / "model")
    ended = engines.run(tmp_path, model, environment(tmp_path, **{f"MOE_DIST_TEST_{name}": "1" for name in card}), **parallel)
    assert ended.results, ended.log[-3000:]
    require_equal(ended.results, models.truth(model, PROMPTS), 1e-4)
    assert len(ended.counts) == parallel.get("tp_size", 1)
    for counts in ended.counts:  # one of its two layers is dense
        assert (counts["core"], counts.get("shared", 0)) == (STEPS, STEPS if "FUSE" in card else 0)


def test_a_draft_model_tunes_apart_from_its_target_on_both_ranks(
    engines: Engines, tmp_path: Path, model: Path, truth: list[dict[str, Any]]
) -> None:
    """Its one MoE layer is of the target's shape. One token is asked: the draft too runs the prompt for it, and SGLang decodes by Triton."""
    store = str(tmp_path / "store")
    ended = engines.run(
        tmp_path, model, environment(tmp_path, store), new_tokens=1, tp_size=2, speculative_algorithm="NEXTN",
        speculative_draft_model_path=str(model), speculative_num_steps=1, speculative_eagle_topk=1, speculative_num_draft_tokens=2,
    )  # fmt: skip
    assert ended.results, ended.log[-3000:]
    asked = [len(prompt) for prompt in PROMPTS]
    require_equal(
        ended.results,
        [{"tokens": true["tokens"][:1], "logprobs": true["logprobs"][:length]} for true, length in zip(truth, asked, strict=True)],
        1e-4,
    )
    assert [counts["core"] for counts in ended.counts] == [LAYERS + 1] * 2
    for layers, measured in ((LAYERS, r"[1-9]\d*"), (1, "0")):  # what the target timed serves the draft, whose keys are the same
        served = ended.found(rf" {layers} layers serve epoch (\d+ \(\w+\)) of {store}; {measured} candidates timed")
        assert len(served) == 2, ended.log[-3000:]
        assert len(set(served)) == 1
    target = f"sglang:{model}:tp2-ep1-dp1-pp1:stage0"
    assert sorted(epoch.deployment for epoch in stored_epochs(store)) == [target, f"{target}:draft0"]


def test_without_the_plugin_the_choice_is_refused(engines: Engines, tmp_path: Path, model: Path) -> None:
    ended = engines.run(tmp_path, model, environment(tmp_path, SGLANG_PLUGINS="moe_dist_cpu"))
    assert not ended.results
    assert ended.returncode != 0
    assert "MoE runner backend 'moe_dist' is neither built in nor registered" in ended.log


def test_without_the_choice_the_plugin_changes_nothing(engines: Engines, tmp_path: Path, model: Path, truth: list[dict[str, Any]]) -> None:
    ended = engines.run(tmp_path, model, environment(tmp_path), moe_runner_backend="auto")
    assert ended.results, ended.log[-3000:]
    require_equal(ended.results, truth, 1e-4)
    assert ended.counts == ({"core": 0, "native": LAYERS * STEPS},)


def test_a_plugin_that_fails_at_import_is_no_choice(engines: Engines, tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken" / "moe_dist_sglang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libnothing.so.1: cannot open shared object file')\n")
    environ = environment(tmp_path)
    ended = engines.run(tmp_path, model, environ | {"PYTHONPATH": f"{broken.parent}:{environ['PYTHONPATH']}"})
    assert not ended.results
    assert ended.returncode != 0
    assert "Failed to load plugin moe_dist" in ended.log
    assert "MoE runner backend 'moe_dist' is neither built in nor registered" in ended.log


def test_a_layer_with_another_runner_ends_start_up(engines: Engines, tmp_path: Path, model: Path) -> None:
    """Some other plugin, or a release of SGLang that goes another way, gives layer 1 Triton after all."""
    ended = engines.run(tmp_path, model, environment(tmp_path, MOE_DIST_TEST_STEAL="1"))
    assert not ended.results
    assert ended.returncode != 0
    assert "model.layers.1.mlp.experts: SGLang gave it the runner" in ended.log
    assert ended.counts == ()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"enable_torch_compile": True},
            "model.layers.0.mlp.experts: --enable-torch-compile would trace through moe_dist's choice of a tactic; leave it away",
        ),
        (  # SGLang changes the choice, and says so in a warning alone
            {"quantization": "mxfp8", "dtype": "bfloat16"},
            "SGLang runs --moe-runner-backend flashinfer_trtllm instead of moe_dist, as its log says why",
        ),
    ],
    ids=["compiled", "mxfp8"],
)
def test_an_option_that_is_not_served_ends_start_up_with_its_reason(
    engines: Engines, tmp_path: Path, model: Path, options: dict[str, Any], reason: str
) -> None:
    ended = engines.run(tmp_path, model, environment(tmp_path), **options)
    assert not ended.results
    assert ended.returncode != 0
    assert reason in ended.log
    assert ended.counts == ()


def test_a_model_that_asks_no_runner_ends_start_up(engines: Engines, tmp_path: Path) -> None:
    """AFMoE's blocks call a Triton kernel of SGLang's themselves, whatever runner was chosen."""
    ended = engines.run(tmp_path, models.make_afmoe(tmp_path / "model"), environment(tmp_path), (), load_format="dummy")
    assert ended.returncode != 0
    assert "model.layers.1.mlp: AfmoeMoE has no FusedMoE: it calls SGLang's kernels itself, whatever runner is chosen" in ended.log
    assert ended.counts == ()
