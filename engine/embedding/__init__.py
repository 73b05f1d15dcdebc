"""The engine of models that make vectors of texts."""
