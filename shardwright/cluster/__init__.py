"""Sets up the devices and processes of a run: mesh, compiler options, joining, watching for stalls,
stopping.
"""
