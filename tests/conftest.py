"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share few cores; read when torch is imported

# How long an example takes says more about the machine than about the code: no test of ours judges by time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
