"""Keys: changing any one field changes the key, so that no result is reused where it was not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moe_dist as md
from moe_dist.tuning.identity import Environment, Key, build_environment, driver_in
from moe_dist.tuning.problem import Bucket, Cell, ProbeSpec, Problem, Tactic, canonical, digest, pack, unpack

ENVIRONMENT = Environment(
    format_version=1, device_type="cuda", device_name="NVIDIA H200", compute_capability="9.0", sm_count=132, driver="580.1", cuda="13.0",
    torch="2.11.0", triton="3.6.0", moe_dist="0.1.0", kernel_sources="abc", host_threads=0, backends=(("flashinfer", "0.7.2"),),
)  # fmt: skip
CELL = Cell(Problem.of("moe_layer", experts=8, shape=(128, 64)), "eager", Bucket(5, 8))
KEY = Key(environment=ENVIRONMENT, cell=CELL, policy="eager", objective="max", probe=ProbeSpec())


def others(value: Any) -> Iterator[Any]:
    """Values of the same kind as `value`, all different from it. TypeError: a new kind of field needs a line here."""
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
        case float():
            yield value + 0.5
        case str():
            yield value + "x"
        case tuple():
            yield (*value, ("new", 1))
        case _ if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                for other in others(getattr(value, field.name)):
                    yield unchecked(value, field.name, other)
        case _:
            raise TypeError(f"no other value for {value!r}")


def unchecked(value: Any, name: str, other: Any) -> Any:
    """`value` with one field changed, past the checks that its constructor makes: a key must tell impossible values apart as well."""
    changed = object.__new__(type(value))
    for field in dataclasses.fields(value):
        object.__setattr__(changed, field.name, other if field.name == name else getattr(value, field.name))
    return changed


def changes(value: Any) -> list[Any]:
    return [pytest.param(field.name, id=field.name) for field in dataclasses.fields(value)]


@pytest.mark.parametrize("field", changes(ENVIRONMENT))
def test_changing_any_field_of_the_environment_changes_the_key_and_its_folder(field: str) -> None:
    for other in others(getattr(ENVIRONMENT, field)):
        changed = dataclasses.replace(KEY, environment=dataclasses.replace(ENVIRONMENT, **{field: other}))
        assert changed.digest != KEY.digest
        assert changed.path.rpartition("/")[0] != KEY.path.rpartition("/")[0]
        assert list(ENVIRONMENT.differences(changed.environment)) == [field]


@pytest.mark.parametrize("field", changes(KEY))
def test_changing_any_field_of_the_key_changes_it_down_to_its_leaves(field: str) -> None:
    seen = {KEY.digest}
    for other in others(getattr(KEY, field)):
        changed = dataclasses.replace(KEY, **{field: other})
        assert changed.digest not in seen
        assert changed.path != KEY.path
        seen.add(changed.digest)
    assert len(seen) > 1


@pytest.mark.parametrize("other", [Bucket(4, 8), Bucket(5, 9)])
def test_both_ends_of_a_bucket_count(other: Bucket) -> None:
    assert dataclasses.replace(KEY, cell=dataclasses.replace(CELL, bucket=other)).digest != KEY.digest


def configs() -> Iterator[tuple[str, md.MoEConfig]]:
    """The config of a layer with one field of one part changed, for every field that says what is computed."""
    base = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=64, intermediate_size=32))
    for part in dataclasses.fields(base):
        value = getattr(base, part.name)
        if value is None or part.name == "backends":
            continue  # which backends are tried is not what they compute
        for field in dataclasses.fields(value):
            if part.name == "execution" and field.name in ("tune_max_num_tokens", "output"):
                continue  # how far buckets reach, and who owns the output
            old = getattr(value, field.name)
            for other in [7] if old is None else others(old):
                yield f"{part.name}.{field.name}", unchecked(base, part.name, unchecked(value, field.name, other))


@pytest.mark.parametrize(("name", "config"), [pytest.param(name, config, id=f"{name}-{at}") for at, (name, config) in enumerate(configs())])
def test_changing_any_field_of_a_layers_config_changes_its_problem(name: str, config: md.MoEConfig) -> None:
    base = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=64, intermediate_size=32))
    assert md.MoEProblem(config, True).key() != md.MoEProblem.of(base, routed=True).key()


def test_a_routed_call_is_another_problem() -> None:
    base = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=64, intermediate_size=32))
    assert md.MoEProblem.of(base, routed=True).key() != md.MoEProblem.of(base, routed=False).key()


def test_top_k_with_a_fused_shared_expert_and_with_local_experts_only_are_three_keys() -> None:
    experts = md.ExpertConfig(hidden_size=64, intermediate_size=32)
    routings = [md.RoutingConfig(64, 8, num_fused_shared_experts=1), md.RoutingConfig(64, 8), md.RoutingConfig(64, 7)]
    problems = [md.MoEProblem.of(md.MoEConfig(routing=routing, experts=experts), routed=True).key() for routing in routings]
    assert len(set(problems)) == 3


# -- canonical forms fail closed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), torch.float16, 1j, lambda: 0, {1: 2}, torch.device("cpu"), type])
def test_a_type_without_a_stable_meaning_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        canonical({"field": value})
    with pytest.raises(TypeError):
        Problem.of("moe_layer", field=value)


class Text(str):
    pass


def test_a_subclass_is_refused_since_its_meaning_is_unknown() -> None:
    with pytest.raises(TypeError, match="Text can't be part of a key"):
        canonical(Text("x"))


def test_values_that_compare_equal_in_python_are_different_keys() -> None:
    assert len({digest(value) for value in (1, 1.0, True, "1", (1,), None, 0, False, "")}) == 9


def test_the_order_of_named_fields_does_not_count_and_that_of_a_list_does() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([1, 2]) != digest([2, 1])


def test_a_key_survives_its_bytes() -> None:
    packed = pack(KEY.canonical())
    assert unpack(packed) == KEY.canonical()
    fields = dict(dict(unpack(packed)[1])["environment"][1])
    assert Environment.from_plain(fields) == ENVIRONMENT == Environment.from_plain(ENVIRONMENT.to_plain())


def test_a_key_is_the_same_in_every_process() -> None:
    """No hash of Python's, no id, no order of a set goes into a key. A stored entry must be found by the next process."""
    assert digest(Cell(Problem.of("x", a=1), "eager", Bucket(1, 2))) == "cd4e30de3937c5c1c417a89b7f645258"


# -- this machine -------------------------------------------------------------------------------------------------------


def test_the_environment_of_this_machine_knows_every_field() -> None:
    environment = build_environment(torch.device("cpu"), {"vllm": "0.33", "flashinfer": "0.7"})
    assert environment.backends == (("flashinfer", "0.7"), ("vllm", "0.33"))
    assert environment.torch == torch.__version__
    assert environment.host_threads == torch.get_num_threads(), "more threads are another machine"
    assert environment.device_name
    assert environment.kernel_sources != "absent"
    assert build_environment(torch.device("cpu"), {"flashinfer": "0.7", "vllm": "0.33"}) == environment


def test_a_tactic_is_named_by_its_parameters_not_by_their_order() -> None:
    assert Tactic.of("x", b=1, a=2) == Tactic.of("x", a=2, b=1)
    assert Tactic.of("x", a=1) != Tactic.of("x", a=1, collective=True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        # The proprietary module, the open one, and one with a branch's name behind the number.
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24 22:52:18 UTC 2024\nGCC version:  gcc version 12.3.0\n",
            "535.161.08",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)  Mon Sep  8\nGCC version:  13.3.0\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86  Release Build  (dvs-builder)\n", "570.86"),
    ],
)
def test_the_drivers_version_is_read_from_what_its_module_says(text: str, version: str) -> None:
    assert driver_in(text) == version


def test_a_text_without_a_driver_version_is_refused() -> None:
    with pytest.raises(ValueError, match="no driver version in 'GCC version:  gcc version 12"):
        driver_in("GCC version:  gcc version 12.3.0 ")
