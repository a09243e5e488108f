"""The SGLang plugin: `--moe-runner-backend moe_dist`.

SGLang finds `register` under the entry point group `sglang.srt.plugins` and calls it once in every process, before it reads
its arguments. Importing this package loads neither SGLang nor torch.
"""


def register() -> None:
    """Add the choice `moe_dist` and its hooks. RuntimeError: this SGLang lacks what the plugin relies on; no choice is added then."""
    from moe_dist_sglang.compat import SGLANG

    if (misfit := SGLANG.misfit()) is not None:
        raise RuntimeError(f"{misfit}; SGLang is left as it is, without --moe-runner-backend moe_dist")
    from moe_dist_sglang import hooks

    hooks.install()
