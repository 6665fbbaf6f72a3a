"""Decoders built on kernels are tested as the kernels are: on the host under sanitizers; ``-m gpu``: on a device."""

from tests.kernels.conftest import host_cuda, to_numpy, xp

__all__ = ["host_cuda", "to_numpy", "xp"]
