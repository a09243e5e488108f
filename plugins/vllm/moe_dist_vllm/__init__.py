"""The vLLM plugin: brings moe_dist in as `--moe-backend=moe_dist`."""
