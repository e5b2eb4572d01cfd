"""Engines run a method: all clients in one process, or a federation across machines."""
