"""Bytes between parts of a job: columnar frames, values in them, and the ways they travel. Nothing
that is read is ever executed.
"""
