"""The fp32 truth that kernels are judged against: one plain loop, no shared code with what it judges."""

from __future__ import annotations

import torch


def activate(rows: torch.Tensor, kind: str, limit: float | None, alpha: float, beta: float) -> torch.Tensor:
    if kind in ("swiglu", "geglu"):
        gate, up = rows.chunk(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = gate * torch.sigmoid(alpha * gate) if kind == "swiglu" else torch.nn.functional.gelu(gate, approximate="tanh")
        return inner * (up + beta)
    if limit is not None:
        rows = rows.clamp(-limit, limit)
    if kind == "relu2":
        return rows.relu() ** 2
    return torch.nn.functional.gelu(rows, approximate="tanh") if kind == "gelu" else torch.nn.functional.silu(rows)


def experts_truth(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    kind: str,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """fp32 [T, K, H], weighted, zeros for remote slots."""
    out = torch.zeros(*ids.shape, x.shape[1])
    for t, k in [(t, k) for t in range(ids.shape[0]) for k in range(ids.shape[1])]:
        expert = int(ids[t, k])
        if expert_map is not None:
            expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
        if not 0 <= expert < w13.shape[0]:
            continue
        weight = weights[t, k].float()
        row = x[t].float() * (weight if weight_on_input else 1.0)
        row = w13[expert].float() @ row + (0.0 if w13_bias is None else w13_bias[expert].float())
        row = activate(row, kind, limit, alpha, beta)
        row = w2[expert].float() @ row + (0.0 if w2_bias is None else w2_bias[expert].float())
        out[t, k] = row * (1.0 if weight_on_input else weight)
    return out


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """||got - truth|| / ||truth||; NaN never passes a bound."""
    return float((got.float() - truth).norm() / truth.norm().clamp(min=1e-30))
