"""What the fork server loads first: Arrow, so that all hosts have it as they need it."""

from overlord import forking, importpath
from overlord.allocators import system_pool

with system_pool():
    import pyarrow as pa

    pa.default_memory_pool()  # decided for good

importpath.restore_settings()
forking.leave_no_socket()
