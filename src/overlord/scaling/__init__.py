"""Decide the loaders of every source, the worker of each loader, and changes of both.

The decisions use measured profiles of sources. All modules are pure: they start no process.
"""
