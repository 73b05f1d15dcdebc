"""Runs parsed requests on the engine: from a dialect's request to the text and tokens of its response."""
