"""The engine workers as the data plane sees them: connections, tokenizers, adapters."""
