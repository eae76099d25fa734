"""The first module that the fork server loads: it configures Arrow for all workers."""

from overlord import import_path
from overlord.process import forkserver
from overlord.process.resources import system_pool

with system_pool():
    import pyarrow as pa

    pa.default_memory_pool()  # the choice of the pool is final

import_path.restore_settings()
forkserver.remove_socket_at_exit()
