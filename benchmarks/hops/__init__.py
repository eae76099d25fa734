"""One hop of a message between two processes, by every way there is: the job (job.py), the ways
(ways.py), how they are run (run.py).
"""
