"""One hop of a message between two processes, by every transport.

``job.py`` has the job, ``ways.py`` the transports, and ``run.py`` runs them.
"""
