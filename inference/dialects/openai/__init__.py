"""OpenAI's API as vLLM serves it: models, completions, chat completions, responses, embeddings."""
