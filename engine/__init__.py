"""The decode engine: token ids in, token ids out. It knows no HTTP, no Django and no dialect."""
