"""Batched scoring and decoding for LLM requests that share prefixes."""

__version__ = "0.1.0"
