"""Rehearsing faults: a job is run undisturbed, then again while its parts are killed, and both must
deliver the same bytes.
"""
