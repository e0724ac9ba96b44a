"""How long a pod may take until it serves, from the size of its weights: the patience of probe and rollout."""

from __future__ import annotations

import math
from dataclasses import dataclass

READ_BYTES_PER_S = 200e6
"""A modest network volume: local NVMe reads ten times as fast, and then nothing waits."""

DOWNLOAD_BYTES_PER_S = 25e6
"""A hub over a busy line of 200 Mbit/s."""

FIXED_S = 120
"""Whatever the model: imports, the CUDA context, the profiling pass, captured graphs."""

SHORTEST_S = 600
_MARGIN = 2
_BEFORE_START_S = 900
"""Until the container starts: a node that scales up, an image of several GiB."""


@dataclass(frozen=True, slots=True)
class StartupBudget:
    """Seconds after which something must be wrong."""

    load_s: int
    """From the start of the server's container until it is ready: longer means that it hangs, and it is restarted."""

    progress_s: int
    """From a pod's creation until it is ready, download included: longer means that the rollout is stuck."""


def startup_budget(weights_bytes: float, *, downloads: bool) -> StartupBudget:
    """Twice the predicted time. The download runs in an init container, which no probe of the server's waits for."""
    load_s = max(SHORTEST_S, math.ceil(_MARGIN * (FIXED_S + weights_bytes / READ_BYTES_PER_S)))
    download_s = math.ceil(_MARGIN * weights_bytes / DOWNLOAD_BYTES_PER_S) if downloads else 0
    return StartupBudget(load_s, load_s + download_s + _BEFORE_START_S)
