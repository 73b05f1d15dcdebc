"""The data plane's side of engine workers: connections, tokenizers, adapters."""
