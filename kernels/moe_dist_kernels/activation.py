"""The activation between an expert's two products, in fp32 registers. Used by every kernel that computes the first product."""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr):
    """fp32 -> fp32, elementwise. Gated kinds take both; ungated ones read `up` alone and `gate` may be anything.

    LIMIT: gate clamped from above, up to [-LIMIT, LIMIT] (ungated: the input to [-LIMIT, LIMIT]); None: no clamp.
    NaN stays NaN. swiglu: g * sigmoid(ALPHA * g) * (u + BETA), so activate(1, 2) = 0.7311 * 2 = 1.4621.
    """
    if LIMIT is not None:
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "swiglu" or KIND == "geglu":
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if KIND == "swiglu":
            out = gate * tl.sigmoid(ALPHA * gate) * (up + BETA)
        else:
            out = _gelu_tanh(gate) * (up + BETA)
    elif KIND == "relu2":
        positive = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
        out = positive * positive
    elif KIND == "silu":
        out = up * tl.sigmoid(up)
    else:
        tl.static_assert(KIND == "gelu", "unknown activation")
        out = _gelu_tanh(up)
    return out


@triton.jit
def _gelu_tanh(x):
    # 0.5 * (1 + tanh(z)) is sigmoid(2 z): one exponential, no tanh needed.
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
