"""One folder a dialect: it parses bodies into `GenerationRequest`s and renders results, and holds no engine logic."""
