"""Models with random weights, made on the spot."""
