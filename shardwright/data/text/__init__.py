"""Reads text from files or the Hugging Face hub, and encodes and decodes it with tokenizers."""
