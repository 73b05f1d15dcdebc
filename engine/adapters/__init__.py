"""LoRA adapters: their files, the weights in them, and which of them stand in a slot."""
