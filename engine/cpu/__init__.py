"""The CPU backend: layers, forward pass, attention, KV cache and their kernels."""
