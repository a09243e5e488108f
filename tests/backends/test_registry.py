"""The registry: who can run what, in which order, and why not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moe_dist as md
from moe_dist.backends.registry import BACKENDS, PRIORITY, get_backend, usable_backends
from tests.backends.native import NativeBackend, NativeConfig

CPU = torch.device("cpu")
SMALL = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=32, intermediate_size=16))
LARGE = dataclasses.replace(SMALL, routing=md.RoutingConfig(256, 2))
INVARIANT = dataclasses.replace(SMALL, execution=md.ExecutionConfig(batch_invariant=True))


def names(configs: list[md.BackendConfig]) -> list[str]:
    return [config.name for config in configs]


def test_every_registration_is_whole() -> None:
    for backend in BACKENDS:
        assert get_backend(backend.name) is backend
        assert backend.config_type.name == backend.name
        assert backend.config_type() == backend.config_type()
    registered = {backend.name for backend in BACKENDS}
    assert {name for table in PRIORITY.values() for name in table} <= registered | {"triton"}  # triton is there where its package is
    assert all("reference" not in table for table in PRIORITY.values())


def test_best_guess_first_and_the_reference_last() -> None:
    on_cpu = [name for name in names(md.find_backends(SMALL, "cpu")) if name != "triton"]
    assert on_cpu == ["torch_grouped", "torch_loop", "torch_dense", "reference"]


def test_what_cannot_run_is_left_out_with_its_reason() -> None:
    assert "torch_dense" not in names(md.find_backends(LARGE, "cpu"))
    reasons = md.explain_backends(LARGE, "cpu")
    assert reasons["torch_grouped"] is None
    assert reasons["torch_dense"] == "torch_dense runs every token through all 256 experts of a rank; its limit is 64: use torch_grouped"


def test_ep_counts_the_experts_of_a_rank() -> None:
    cut = dataclasses.replace(LARGE, parallel=md.ParallelConfig(ep_size=4))
    assert md.explain_backends(cut, "cpu")["torch_dense"] is None


def test_the_config_chooses_and_orders() -> None:
    chosen = dataclasses.replace(SMALL, backends=md.TorchDenseConfig(max_experts=9) | md.TorchLoopConfig())
    assert md.find_backends(chosen, "cpu") == [md.TorchDenseConfig(max_experts=9), md.TorchLoopConfig()]
    alone = dataclasses.replace(SMALL, backends=md.ReferenceConfig())
    assert md.find_backends(alone, "cpu") == [md.ReferenceConfig()]


def test_parameters_of_the_config_decide() -> None:
    strict = dataclasses.replace(SMALL, backends=md.TorchDenseConfig(max_experts=7))
    assert md.find_backends(strict, "cpu") == []
    assert "its limit is 7" in str(md.explain_backends(strict, "cpu")["torch_dense"])


def test_request_gives_the_config_with_its_parameters() -> None:
    assert md.request_backend("torch_loop", SMALL, "cpu", chunk_rows=(8,)) == md.TorchLoopConfig(chunk_rows=(8,))
    assert md.request_backend("torch_dense", LARGE, "cpu", max_experts=256) == md.TorchDenseConfig(max_experts=256)


def test_request_of_what_cannot_run_carries_every_reason() -> None:
    with pytest.raises(md.UnsupportedBackend, match=r"torch_dense runs every token through all 256 experts") as caught:
        md.request_backend("torch_dense", LARGE, "cpu")
    assert caught.value.backend == "torch_dense"
    assert caught.value.reason.startswith("torch_dense runs every token")
    assert set(caught.value.reasons) == set(md.explain_backends(LARGE, "cpu"))
    assert "torch_loop: can run it" in str(caught.value)


def test_request_of_an_unknown_backend_or_parameter() -> None:
    with pytest.raises(md.UnsupportedBackend, match=r"'flash' can't run this: there is no such backend; known: .*torch_grouped"):
        md.request_backend("flash", SMALL, "cpu")
    with pytest.raises(md.ConfigError, match=r"backend 'torch_loop': .*chunks"):
        md.request_backend("torch_loop", SMALL, "cpu", chunks=3)
    with pytest.raises(md.ConfigError, match=r"chunk_rows is \(-1,\); give row counts of at least 1"):
        md.request_backend("torch_loop", SMALL, "cpu", chunk_rows=(-1,))


def test_impossible_problem_lists_every_backend() -> None:
    problem = md.MoEProblem.of(dataclasses.replace(SMALL, quant=md.QuantConfig(weight="int8")), routed=True)
    with pytest.raises(md.UnsupportedBackend, match=r"^no backend can run this: on cpu, each with its reason") as caught:
        next(usable_backends(problem, CPU, None))
    for name in ("torch_grouped", "torch_loop", "torch_dense"):
        assert f"\n  {name}: " in str(caught.value)
        assert "int8" in str(caught.value.reasons[name])


def test_the_reference_runs_only_by_name() -> None:
    problem = md.MoEProblem.of(INVARIANT, routed=True)
    with pytest.raises(md.UnsupportedBackend, match="batch_invariant can't be promised"):
        next(usable_backends(problem, CPU, md.BackendOptions((md.TorchLoopConfig(), md.TorchGroupedConfig()))))
    found = usable_backends(problem, CPU, md.BackendOptions((md.ReferenceConfig(),)))
    assert [backend.name for backend, _ in found] == ["reference"]


def test_backends_are_asked_only_as_far_as_needed() -> None:
    # The first that can run serves every stateless call; asking the others would cost more than the call.
    class Silent(NativeBackend):
        def why_not(self, problem: md.MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
            raise AssertionError("asked in vain")

    problem = md.MoEProblem.of(SMALL, routed=True)
    backend, _ = next(usable_backends(problem, CPU, None, [Silent()]))
    assert backend.name == "torch_grouped"
    with pytest.raises(AssertionError, match="asked in vain"):
        list(usable_backends(problem, CPU, None, [Silent()]))


def test_a_callers_backend_takes_part() -> None:
    extra = [NativeBackend()]
    found = [name for name in names(md.find_backends(SMALL, "cpu", extra_backends=extra)) if name != "triton"]
    assert found == ["torch_grouped", "torch_loop", "torch_dense", "native", "reference"]
    assert "native" not in md.explain_backends(SMALL, "cpu")  # nothing stays registered
    assert md.request_backend("native", SMALL, "cpu", extra_backends=extra, fast=False) == NativeConfig(fast=False)


def test_a_callers_backend_may_not_shadow_ours() -> None:
    class Shadow(NativeBackend):
        name = "torch_loop"

    with pytest.raises(md.ConfigError, match="'torch_loop' is registered already; give yours another name"):
        md.find_backends(SMALL, "cpu", extra_backends=[Shadow()])


def test_a_backend_and_its_config_share_a_name() -> None:
    class Renamed(NativeBackend):
        name = "other"

    with pytest.raises(md.ConfigError, match="backend 'other' has a config named 'native'; give both one name"):
        md.find_backends(SMALL, "cpu", extra_backends=[Renamed()])


def test_a_device_that_is_not_there_is_a_reason() -> None:
    chosen = dataclasses.replace(SMALL, backends=md.TorchGroupedConfig(methods=("grouped_mm",)) | md.TorchDenseConfig())
    reasons = md.explain_backends(chosen, "cuda:99")
    assert {reasons[name] for name in ("torch_grouped", "torch_loop", "torch_dense")} == {"there is no device cuda:99 in this process"}


def test_atomics_are_refused_where_bits_must_repeat() -> None:
    strict = dataclasses.replace(SMALL, execution=md.ExecutionConfig(deterministic=True))
    assert (
        md.explain_backends(strict, "cuda:0")["torch_loop"]
        == "torch_loop adds rows by atomics on a GPU, so deterministic can't be promised"
    )
    assert md.explain_backends(strict, "cpu")["torch_loop"] is None
