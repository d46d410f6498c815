"""Compiled programs: their operations by source line, as a table, a picture and a profile."""
