"""The bounds on the number of sequences, by the names that `limitedBy` takes."""

from __future__ import annotations

from typing import Literal

LimitedBy = Literal["kvMemory", "maxNumSeqs", "itlPromise", "ridge", "tokenBudget", "cap"]
"""Which bound set `max_num_seqs`:

- `kvMemory`: the KV pool, at the policy's tokens a sequence
- `maxNumSeqs`: the user's own number
- `itlPromise`: the decode step would take longer than the promised inter-token latency
- `ridge`: from here on arithmetic takes longer than reading the weights, so a larger batch adds latency, no throughput
- `tokenBudget`: `max_num_batched_tokens`, of which a decode step needs one for every sequence
- `cap`: 1024
"""
