"""The SGLang plugin: brings moe_dist in as `--moe-runner-backend moe_dist`."""
