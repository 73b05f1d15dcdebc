"""vLLM's own routes beside OpenAI's: tokens, adapters, versions, the old demo server's /generate."""
