"""A judge behind an OpenAI-compatible API."""
