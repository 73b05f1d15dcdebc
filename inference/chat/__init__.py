"""Chat conversations: messages, reasoning, tools and tool calls."""
