"""Text and tokenizers: files, the hub, token ids and back."""
