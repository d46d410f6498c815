"""Exchange of models with transformers, for the programs that export and import them."""
