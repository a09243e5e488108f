"""What all tests share: one CPU thread a process, interrupts that are heard, the same Hypothesis examples in each run; and GPU tests are skipped
where there is no GPU."""

from __future__ import annotations

import os
import signal

# A run in the background inherits that no interrupt is heard, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several workers and their ranks share few cores; children inherit this. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

try:
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers
except ImportError:  # an engine's environment, whose tests use none
    pass
else:
    # A run of the tests must not fail for another reason than the last one did. `make test-random` looks further.
    settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=200)
    settings.register_profile("random", deadline=None, max_examples=2000, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
    if settings.default.derandomize and hasattr(providers, "_get_local_constants"):
        # Constants of our own modules, as far as they happen to be imported, are examples too: other ones in another worker.
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
