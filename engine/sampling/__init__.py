"""Sampling: the parameters of a request, the filters and the sampler."""
