"""The vLLM plugin: `--moe-backend=moe_dist`. vLLM finds `register` by the entry point group `vllm.general_plugins`.

vLLM calls it in the front end, in the engine core and in every worker, perhaps more than once: it loads no model code and
touches no device. What must change in vLLM changes when vLLM itself loads the module in question (`patch.py`).
"""

from __future__ import annotations


def register() -> None:
    """Offer moe_dist as a MoE backend of this process's vLLM; changes nothing where that vLLM does not fit, and says so."""
    from moe_dist_vllm.patch import install

    install()
