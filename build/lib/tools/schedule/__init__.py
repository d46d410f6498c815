"""Draws and simulates pipeline schedules."""
