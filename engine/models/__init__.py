"""Loads models: from the files to a model whose logits are verified against transformers."""
