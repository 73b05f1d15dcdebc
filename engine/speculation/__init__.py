"""Draft tokens: where they come from, and how many are worth their computation."""
