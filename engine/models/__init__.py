"""From a model's files to a model that is proven to compute what transformers computes."""
