"""Programs other than training. A program larger than a file is a folder with __main__.py."""
