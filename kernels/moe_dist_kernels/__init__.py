"""Triton and Gluon kernels and their launchers. They know nothing of tuning, backends or ranks."""
