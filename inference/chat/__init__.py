"""Conversations: messages, reasoning, tools and the calls of tools."""
