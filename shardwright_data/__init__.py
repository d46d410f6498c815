"""Data of a run: text and tokenizers, datasets of flat tokens, batches; and how files from elsewhere are read."""
