"""Devices and processes: the mesh, compiler options, joining, watching, stopping."""
