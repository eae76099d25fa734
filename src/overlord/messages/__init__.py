"""Messages between the parts of a job, one module per sender. Frozen values: ids and metadata,
payload only where stated.
"""
