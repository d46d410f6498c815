"""Devices and processes of a run: mesh, compiler options, joining, watching, stopping."""
