"""Makes a project that trains a model of its own."""
