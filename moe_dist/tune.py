"""What `torchrun -m moe_dist.tune` starts on every rank: the `tune` command, nothing more."""

from __future__ import annotations

import sys

from moe_dist.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
