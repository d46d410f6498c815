"""Reports on a run, or compares several, as a table and an HTML page."""
