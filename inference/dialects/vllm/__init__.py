"""vLLM's own routes besides OpenAI's: tokens, adapters, version, and the old demo server's /generate."""
