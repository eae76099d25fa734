"""Profiles of sources, the number of their loaders, the worker of each, and changes of both. Pure:
this package starts no process.
"""
