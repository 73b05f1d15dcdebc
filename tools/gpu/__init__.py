"""Measures and checks the engine on CUDA devices."""
