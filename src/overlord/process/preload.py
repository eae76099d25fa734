"""What the fork server loads first: Arrow, so that all hosts have it as they need it."""

from overlord import import_path
from overlord.process import forkserver
from overlord.process.malloc import system_pool

with system_pool():
    import pyarrow as pa

    pa.default_memory_pool()  # decided for good

import_path.restore_settings()
forkserver.leave_no_socket()
