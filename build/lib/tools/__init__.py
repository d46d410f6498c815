"""Programs beside training. A program larger than a file is a folder with __main__.py."""
