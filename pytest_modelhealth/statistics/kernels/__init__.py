"""Kernels: from dense values to a `KernelResult`, a file each.

A kernel is a module with two functions, ``summarize(values)`` and ``unit_extremes(values, dim)``,
for strided tensors of the dtypes in `KERNEL_DTYPES`. `plain` is right everywhere, and the oracle
that faster ones are held against.
"""
