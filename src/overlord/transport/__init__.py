"""Transport between the processes of a job: frames, codec, shared memory and sockets.

Received bytes are never executed.
"""
