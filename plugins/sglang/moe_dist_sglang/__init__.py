"""The SGLang plugin: `--moe-runner-backend moe_dist`.

SGLang finds `register` under the entry point group `sglang.srt.plugins` and calls it once in every process, before it reads
its arguments. Importing this package loads neither SGLang nor torch.
"""


def register() -> None:
    """Add the choice `moe_dist` and its hooks. Raises, and adds no choice, where this SGLang lacks a place that a hook needs."""
    from moe_dist_sglang import hooks

    hooks.install()
