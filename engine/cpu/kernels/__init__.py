"""Kernels for operations that are too slow in torch: written in Python, compiled by Numba at first use, cached on disk.

They know addresses, strides and element types; no request, no model and no torch module is named here.
"""
