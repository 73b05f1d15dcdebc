"""The parts of the engine that see no tensors. Nothing here imports torch."""
