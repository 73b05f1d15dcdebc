"""Kernels for what torch does too slowly: written in Python, compiled by Numba when first used, and kept on disk.

They know addresses, strides and element types; no request, no model and no torch module is named here.
"""
