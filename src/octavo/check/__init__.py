"""Checks of compiled kernels that need no GPU: compile for a named target, inspect, execute AMD code objects."""
