"""LoRA adapters: their files, their weights, and their assignment to slots."""
