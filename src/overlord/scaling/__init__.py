"""Decisions on the number of loaders of each source, the worker of each loader, and changes.

The decisions use measured profiles of sources. All modules are pure: they start no process.
"""
