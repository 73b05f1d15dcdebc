"""How tokens are chosen: the parameters of a request, the filters, the sampler."""
