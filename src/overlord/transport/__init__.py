"""Transport between the processes of a job: columnar frames, a value codec, shared memory and
sockets. Received bytes are never executed.
"""
