"""One registration per backend; names, priorities, configs and reasons all follow from it.

A backend's module imports its foreign library inside `bind` or `prepare`, never at its top: importing this one stays cheap
and touches no device. Callers add backends of their own (a framework's native experts) by passing instances as `extra_backends`.
`layer.py`, `operation.py` and plugins import this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from moe_dist.backends.base import Backend, MoEProblem
from moe_dist.backends.reference import ReferenceBackend
from moe_dist.backends.torch_dense import TorchDenseBackend
from moe_dist.backends.torch_grouped import TorchGroupedBackend
from moe_dist.backends.torch_loop import TorchLoopBackend
from moe_dist.backends.triton import TritonBackend
from moe_dist.config import BackendConfig, BackendOptions, MoEConfig
from moe_dist.errors import ConfigError, UnsupportedBackend

BACKENDS: tuple[Backend, ...] = (
    TritonBackend(),
    TorchGroupedBackend(),
    TorchLoopBackend(),
    TorchDenseBackend(),
    ReferenceBackend(),
)

# Best guess first, by device type. A backend that a table lacks comes after it, in order of registration.
PRIORITY: dict[str, tuple[str, ...]] = {
    "cpu": ("torch_grouped", "torch_loop", "torch_dense"),
    "cuda": ("triton", "torch_grouped", "torch_loop", "torch_dense"),
}


def get_backend(name: str, extra_backends: Sequence[Backend] = ()) -> Backend:
    """The backend registered as `name`. UnsupportedBackend: there is none."""
    pool = _pool(extra_backends)
    if name not in pool:
        raise UnsupportedBackend(name, f"there is no such backend; known: {', '.join(pool)}")
    return pool[name]


def explain_backends(
    config: MoEConfig, device: torch.device | str, *, routed: bool = True, extra_backends: Sequence[Backend] = ()
) -> dict[str, str | None]:
    """For every backend, best guess first: None where it can run `config` on `device`, else the reason why not.

    routed: calls bring topk_ids and topk_weights. Parameters that `config.backends` gives a backend are taken into account.
    """
    device = torch.device(device)
    given = {option.name: option for option in config.options or ()}
    choice = [given.get(option.name, option) for option in _everything(device, extra_backends)]
    return _reasons(MoEProblem.of(config, routed=routed), choice, device, extra_backends)


def find_backends(
    config: MoEConfig, device: torch.device | str, *, routed: bool = True, extra_backends: Sequence[Backend] = ()
) -> list[BackendConfig]:
    """Configs of the backends that can run `config` on `device`, best guess first: `config.backends` in its order where
    given, else all by priority, the reference last. Empty: none can; `explain_backends` says why.
    """
    device = torch.device(device)
    choice = config.options or _everything(device, extra_backends)
    reasons = _reasons(MoEProblem.of(config, routed=routed), choice, device, extra_backends)
    return [option for option in choice if reasons[option.name] is None]


def request_backend(
    name: str,
    config: MoEConfig,
    device: torch.device | str,
    *,
    routed: bool = True,
    extra_backends: Sequence[Backend] = (),
    **params: object,
) -> BackendConfig:
    """The config of backend `name` with `params`. ConfigError: it has no such parameter. UnsupportedBackend: it can't run
    this; carries its reason, and every other backend's.
    """
    backend = get_backend(name, extra_backends)
    try:
        chosen = backend.config_type(**params)
    except TypeError as error:
        raise ConfigError(f"backend {name!r}: {error}") from error
    reason = backend.why_not(MoEProblem.of(config, routed=routed), torch.device(device), chosen)
    if reason is not None:
        raise UnsupportedBackend(name, reason, explain_backends(config, device, routed=routed, extra_backends=extra_backends))
    return chosen


def usable_backends(
    problem: MoEProblem, device: torch.device, options: BackendOptions | None, extra_backends: Sequence[Backend] = ()
) -> Iterator[tuple[Backend, BackendConfig]]:
    """What may run `problem` unasked, best guess first: `options` in their order, else all but the reference, by priority.

    A backend is asked when its turn comes: who wants the first alone pays for no other.
    UnsupportedBackend: none can; carries every backend's reason.
    """
    choice = options or [option for option in _everything(device, extra_backends) if option.name != ReferenceBackend.name]
    reasons: dict[str, str | None] = {}
    for option in choice:
        backend = get_backend(option.name, extra_backends)
        reasons[option.name] = backend.why_not(problem, device, option)
        if reasons[option.name] is None:
            yield backend, option
    if all(reason is not None for reason in reasons.values()):
        asked = " | ".join(option.name for option in choice) if options else ""
        raise UnsupportedBackend(asked, f"on {device.type}, each with its reason:", reasons)


def _reasons(
    problem: MoEProblem, choice: Iterable[BackendConfig], device: torch.device, extra_backends: Sequence[Backend]
) -> dict[str, str | None]:
    return {option.name: get_backend(option.name, extra_backends).why_not(problem, device, option) for option in choice}


def _pool(extra_backends: Sequence[Backend]) -> dict[str, Backend]:
    pool = {backend.name: backend for backend in BACKENDS}
    for backend in extra_backends:
        if backend.name in pool:
            raise ConfigError(f"backend {backend.name!r} is registered already; give yours another name")
        if backend.config_type.name != backend.name:
            raise ConfigError(f"backend {backend.name!r} has a config named {backend.config_type.name!r}; give both one name")
        pool[backend.name] = backend
    return pool


def _everything(device: torch.device, extra_backends: Sequence[Backend]) -> list[BackendConfig]:
    """All backends as they are without parameters, by priority, the reference last."""
    pool = _pool(extra_backends)
    first = [name for name in PRIORITY.get(device.type, ()) if name in pool]
    rest = [name for name in pool if name not in (*first, ReferenceBackend.name)]
    return [pool[name].config_type() for name in (*first, *rest, ReferenceBackend.name)]
