"""Starts programs with settings: composes them, checks them, prints help and error messages."""
