"""A durable log of records: what must be known after everything was killed. It does not know what
its records mean.
"""
