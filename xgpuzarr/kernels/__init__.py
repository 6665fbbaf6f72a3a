"""CUDA C++ sources (package data) and the functions that launch them.

``*.cu`` and ``*.cuh`` are the kernels: entry points that share out the work, over ``__host__ __device__`` functions
that do it. `compile` turns them into device code at first use; `launch` holds the launchers. Importing this package
imports no cupy.
"""
