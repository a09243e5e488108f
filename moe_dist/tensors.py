"""The tensors of one call. Shapes are legended as T tokens, K slots, E local experts, H hidden, I local intermediate, N router experts.

Packs hold tensors and know their own rank's share; they check nothing by themselves (`layer.py` checks a pack against
a config before anything is launched). Of ours this imports nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(kw_only=True)
class MoEActivationPack:
    """What changes from call to call. Give `router_logits`, or both `topk_ids` and `topk_weights`.

    hidden_states: [T, H] in the config's dtype.
    router_logits: [T, N] floating point, before scoring.
    topk_ids: [T, K] int32 or int64, the model's global expert ids; -1: the slot is empty. An id twice in a row counts twice.
    topk_weights: [T, K] fp32, already scaled; applied as they are. Finite, also where an id is -1 or of another rank.
    """

    hidden_states: torch.Tensor
    router_logits: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class MoEWeightPack:
    """The weights of this rank's share, in the checkpoint layout, and the layouts that backends made of them.

    w13: [E, 2*I, H], gate rows first, then up rows ([E, I, H] for an ungated activation).
    w2: [E, H, I]. w13_bias: [E, 2*I], w2_bias: [E, H] (on TP rank 0 alone, or already divided by tp_size).
    w13_scale, w2_scale: fp32; [E] (tensor), [E, rows] (channel), [E, ceil(rows/b0), ceil(columns/b1)] (block).
    correction_bias: fp32 [N], see RoutingConfig.correction_bias.
    ep_rank, tp_rank: which share these weights are. expert_map: int32 [total experts], global id -> row of w13 and w2,
    -1 for other ranks' experts; None: it follows from ParallelConfig and ep_rank.
    Weights are never written by us; `prepare_for` keeps what a backend derives from them.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None
    ep_rank: int = 0
    tp_rank: int = 0
    expert_map: torch.Tensor | None = None
    _prepared: dict[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, init=False
    )  # `replace` starts anew: other weights, other layouts

    def prepare_for(self, backend: str, layout: Callable[[MoEWeightPack], Any] | None = None) -> Any:
        """The layout that `backend` needs, made once and kept. Without `layout`, the backend's own helper makes it.

        UnsupportedBackend: no such backend.
        """
        if backend not in self._prepared:
            if layout is None:
                from moe_dist.backends.registry import get_backend  # the packs are a leaf; only this convenience reaches up

                layout = get_backend(backend).prepare
            self._prepared[backend] = layout(self)
        return self._prepared[backend]
