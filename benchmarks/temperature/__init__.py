"""Modules of tempbalance_evidence.py: arms, tasks, records."""
