"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about the machine than about the code: no test of ours judges by time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
