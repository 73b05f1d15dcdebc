"""Text Generation Inference's router, version 3: generate, generate_stream, health, info, tokenize."""
