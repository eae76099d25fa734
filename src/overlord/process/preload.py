"""The first module of this package that the fork server loads: it configures Arrow for workers."""

from overlord import import_path
from overlord.process import forkserver
from overlord.process.resources import system_pool

with system_pool():
    import pyarrow as pa

    pa.default_memory_pool()  # the first call chooses the pool, and no later one changes it

import_path.restore_settings()
forkserver.remove_socket_at_exit()
