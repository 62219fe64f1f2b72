"""One thread per test process: on models this small a second one only spins, and eight times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
