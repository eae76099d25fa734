"""Messages between the components of a job, one module per sender.

All are frozen values. They carry ids and metadata, and payload only where stated.
"""
