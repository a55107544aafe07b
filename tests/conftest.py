"""One thread a process: tests share few cores, and spinning threads of several processes starve each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
