"""Programs other than training. A program larger than a file is a folder with __main__.py."""

import sys

from shardwright.settings.starting import prepare

if sys.argv[0] == "-m":  # Python looks for the program, before it imports what that needs
    prepare()
