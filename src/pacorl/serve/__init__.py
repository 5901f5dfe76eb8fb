"""Judges over an OpenAI-compatible API: a launcher of vLLM, and a small server of our own over LocalJudge."""
