"""How moe_dist enters vLLM: the backend's name, the choice of our experts, the tuning in warm-up. Nothing else of vLLM is changed.

vLLM has no registry for MoE backends from outside. The name is added to its Literal, in place, at once; everything that lies
in model code is changed when vLLM loads that module, so that a front end never loads it for us. All or nothing: `compat.py`
is asked first.
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from moe_dist.settings import ServingSettings, serving_settings
from moe_dist_vllm.compat import FUSED_MOE, NAME, UNSERVED, VLLM

HELP = '\n- "moe_dist": Use the fastest kernel for each batch size, tuned together on all ranks in warm-up'
ORACLES = f"vllm.{FUSED_MOE}.oracle"
log = logging.getLogger("moe_dist.vllm")
_MARK = "_moe_dist_installed"  # on the vllm module: whether this process's vLLM is patched


def install() -> None:
    """Patch this process's vLLM once. Where it does not fit, change nothing and log one error that names version and symbols."""
    import vllm

    if hasattr(vllm, _MARK):
        return
    speak_through_vllm()
    if (misfit := VLLM.misfit(vllm.__version__)) is not None:
        log.error("%s; vLLM is left as it is, without --moe-backend=%s", misfit, NAME)
        return
    setattr(vllm, _MARK, True)
    _extend_backend_names()
    hooks: dict[str, Callable[[ModuleType], None]] = {
        f"{ORACLES}.unquantized": functools.partial(_patch_oracle, "unquantized", "UnquantizedMoeBackend"),
        f"{ORACLES}.fp8": functools.partial(_patch_oracle, "fp8", "Fp8MoeBackend"),
        "vllm.v1.worker.gpu_worker": functools.partial(_patch_worker, "Worker"),
        "vllm.v1.worker.cpu_worker": functools.partial(_patch_worker, "CPUWorker"),
    }
    for name, selects in UNSERVED.items():
        hooks[f"{ORACLES}.{name}"] = functools.partial(_refuse_format, name, selects)
    finder = _AfterImport(hooks)
    for name in hooks:
        if name in sys.modules:
            hooks[name](sys.modules[name])
    sys.meta_path.insert(0, finder)


def speak_through_vllm() -> None:
    """Let moe_dist's log lines go where vLLM's go. vLLM sets up its handlers later, so its logger is asked anew for each line."""
    logging.getLogger("moe_dist").parent = logging.getLogger("vllm")


# -- the name --------------------------------------------------------------------------------------------------------------


def _extend_backend_names() -> None:
    """One Literal object is the type of every field and flag that names a MoE backend."""
    import pydantic.dataclasses
    from vllm.config import kernel, speculative
    from vllm.config import vllm as whole

    names: Any = kernel.MoEBackend
    if NAME not in names.__args__:
        names.__args__ = (*names.__args__, NAME)
    # Validators were compiled from the old names; the inner configs first, for the outer ones contain them.
    for config, module in ((kernel.KernelConfig, kernel), (speculative.SpeculativeConfig, speculative), (whole.VllmConfig, whole)):
        pydantic.dataclasses.rebuild_dataclass(config, force=True, _types_namespace=vars(module))
    if (arguments := sys.modules.get("vllm.engine.arg_utils")) is not None:
        _extend_arguments(arguments)


def _extend_arguments(arguments: ModuleType) -> None:
    arguments._compute_kwargs.cache_clear()
    if not arguments.NEEDS_HELP or not hasattr(arguments, "get_attr_docs"):
        return
    documented = arguments.get_attr_docs

    def get_attr_docs(config: type) -> dict[str, str]:
        docs: dict[str, str] = documented(config)
        return docs | {"moe_backend": docs["moe_backend"].rstrip() + HELP} if "moe_backend" in docs else docs

    arguments.get_attr_docs = get_attr_docs  # type: ignore[attr-defined]


# -- the choice ------------------------------------------------------------------------------------------------------------


class LayoutAlias:
    """Our backend as vLLM's oracles see it: equal to their TRITON, which means weights in the checkpoint's layout, and named moe_dist."""

    value = name = NAME

    def __init__(self, triton: Any) -> None:
        self._triton = triton

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._triton

    def __hash__(self) -> int:
        return hash(self._triton)

    def __repr__(self) -> str:
        return f"<{NAME}>"


def _patch_oracle(form: str, enum: str, oracle: ModuleType) -> None:
    backends = getattr(oracle, enum)
    alias = LayoutAlias(backends.TRITON)
    mapped, classes = f"map_{form}_backend", oracle.backend_to_kernel_cls
    map_backend = getattr(oracle, mapped)

    def map_ours(runner_backend: str) -> Any:
        return alias if runner_backend == NAME else map_backend(runner_backend)

    def classes_of_ours(backend: Any) -> Any:
        if backend is not alias:
            return classes(backend)
        from moe_dist_vllm.experts import MoEDistExperts

        return [MoEDistExperts]

    _replace(oracle, mapped, map_ours)
    _replace(oracle, "backend_to_kernel_cls", classes_of_ours)
    _wrap_select(oracle, f"select_{form}_moe_backend", _lora_reason, backends)


def _refuse_format(form: str, selects: Sequence[str], oracle: ModuleType) -> None:
    for select in selects:
        if hasattr(oracle, select):
            _wrap_select(oracle, select, lambda config: f"it has no experts for {form} weights")


def _lora_reason(config: Any) -> str | None:
    return "it does not run LoRA adapters" if config.is_lora_enabled else None


def _wrap_select(oracle: ModuleType, name: str, why_not: Callable[[Any], str | None], backends: Any = None) -> None:
    """Before vLLM selects for a layer that asks for us: say why not; after it refused us: the native choice, where that is allowed.

    backends: the oracle's enum, for vLLM's own experts beside ours.
    """
    select = getattr(oracle, name)

    @functools.wraps(select)
    def select_ours(*args: Any, **kwargs: Any) -> Any:
        config = next(value for value in (*args, *kwargs.values()) if hasattr(value, "moe_backend"))
        if config.moe_backend != NAME:
            return select(*args, **kwargs)
        reason = why_not(config)
        refused = ValueError(f"moe_backend='{NAME}' can't serve this layer: {reason}; choose another --moe-backend, or set {_NATIVE}")
        try:
            if reason is None:
                chosen, experts = select(*args, **kwargs)
                if backends is None or not hasattr(experts, "with_natives"):
                    return chosen, experts  # vLLM 0.26 on a CPU takes its own, whatever was asked for: the check before tuning says so
                from moe_dist_vllm.native import sharing

                return chosen, experts.with_natives(sharing(oracle, backends, select, config, args, kwargs))
        except ValueError as error:
            refused = error
        if not unserved_is_native():
            raise refused
        say_once(f"moe_dist leaves layers to vLLM's own experts: {reason or refused}")
        native = copy.copy(config)
        native.moe_backend = "auto"
        swap = {id(config): native}
        return select(*(swap.get(id(value), value) for value in args), **{key: swap.get(id(value), value) for key, value in kwargs.items()})

    _replace(oracle, name, select_ours)


_NATIVE = "MOE_DIST_UNSERVED=native to give it vLLM's own experts"


def unserved_is_native() -> bool:
    from vllm.config import get_current_vllm_config

    return settings_of(get_current_vllm_config()).unserved == "native"


def asked_for(vllm_config: Any) -> bool:
    """Whether the model or a draft model beside it, which may ask for experts of its own, shall run ours."""
    draft = vllm_config.speculative_config
    return NAME in (vllm_config.kernel_config.moe_backend, draft and draft.moe_backend)


def settings_of(vllm_config: Any) -> ServingSettings:
    """`ServingSettings` from --additional-config's "moe_dist", then the environment. ConfigError: a value or name is wrong."""
    given = vllm_config.additional_config
    return serving_settings(given.get(NAME) if isinstance(given, dict) else None)


@functools.cache
def say_once(line: str) -> None:
    """A warning that would be said for every layer alike."""
    log.warning("%s", line)


def _replace(module: ModuleType, name: str, new: Any) -> None:
    """Rebind `module.name`, and the same object wherever another module of vLLM has imported it already."""
    old = getattr(module, name)
    holders = [held for key, held in list(sys.modules.items()) if key.startswith("vllm.") and held is not module]
    for holder in holders:
        if holder.__dict__.get(name) is old:
            setattr(holder, name, new)
    setattr(module, name, new)


# -- the warm-up -----------------------------------------------------------------------------------------------------------


def _patch_worker(kind: str, module: ModuleType) -> None:
    """Tune after KV sizing and before anything is captured: vLLM's `compile_or_warm_up_model` is where both hold, on every device.

    On a GPU what a tactic may take is counted before, when vLLM measures what is left for the KV cache."""
    worker = getattr(module, kind)
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        if asked_for(self.vllm_config):
            from moe_dist_vllm.warmup import tune

            tune(self)
        return warm_up(self)

    worker.compile_or_warm_up_model = compile_or_warm_up_model
    if kind != "Worker":
        return  # a CPU's KV cache is as large as the user says
    determine = worker.determine_available_memory

    @functools.wraps(determine)
    def determine_available_memory(self: Any) -> Any:
        if not asked_for(self.vllm_config):
            return determine(self)
        from moe_dist_vllm.warmup import scratch_counted

        with scratch_counted(self):
            return determine(self)

    worker.determine_available_memory = determine_available_memory


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `hooks[name](module)` when that module has been loaded, before anyone else sees it."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.get(name)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, hook)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, hook: Callable[[ModuleType], None]) -> None:
        self._loader, self._hook = loader, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)
