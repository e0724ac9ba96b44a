"""Repetition, presence and frequency penalties, from counts that stay on the device.

A step writes one entry for each request, its newest token's; a request's first step writes its row. Any of it may fail
for lack of memory, and the step is then computed again: what is written is noted once it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from llmservice_server.backend.sampling_batch import PenalizedRows, PenaltyHistory, SampledRequest
from llmservice_server.backend.transfer import to_device

_LEAST_SLOTS, _LEAST_WIDTH = 8, 256


class Penalties:
    """The counts of the requests with penalties in the last batch. `penalize` is the backend's."""

    def __init__(self, penalize: Callable[[torch.Tensor, PenalizedRows], None]) -> None:
        self._penalize = penalize
        self._slots: dict[PenaltyHistory, int] = {}
        self._free: list[int] = []
        self._table = torch.empty(2, 0, 0, dtype=torch.int32)
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None
        self._row_numbers: list[int] = []

    def apply(self, logits: torch.Tensor, requests: Sequence[tuple[int, SampledRequest]]) -> None:
        """Change float32 logits `[num_rows, vocab_size]` in place; `requests` have penalties, each with its row."""
        histories = [request.history for _, request in requests if request.history is not None]
        row_numbers = [row for row, _ in requests]
        if self._rows is None or list(self._slots) != histories or row_numbers != self._row_numbers:
            self._rows = None
            self._assign(histories, logits.device)
            self._row_numbers = row_numbers
            numbers = np.array([row_numbers, [self._slots[each] for each in histories]], np.int64)
            self._rows = (to_device(numbers, logits.device), _parameters(requests, logits.device))
        self._update(histories)
        rows, slots = self._rows[0].unbind()
        num_places = np.array([each.num_places for each in histories], np.int64)
        self._penalize(
            logits,
            PenalizedRows(
                rows=rows,
                slots=slots,
                parameters=self._rows[1],
                ids=self._table[0],
                counts=self._table[1],
                num_places=to_device(num_places, logits.device),
                most_places=int(num_places.max()),
            ),
        )

    def _assign(self, histories: Sequence[PenaltyHistory], device: torch.device) -> None:
        """Give each request a slot, in a table that is large enough; the order of `_slots` is that of `histories`."""
        present = set(histories)
        self._free += [slot for history, slot in self._slots.items() if history not in present]
        self._slots = {history: slot for history in histories if (slot := self._slots.get(history)) is not None}
        num_slots, width = self._table.shape[1:]
        widest = max(history.most_places for history in histories)
        if len(histories) > num_slots or widest > width:
            num_slots = max(_LEAST_SLOTS, 1 << (len(histories) - 1).bit_length())
            width = max(_LEAST_WIDTH, 1 << (widest - 1).bit_length())
            self._table = torch.empty(2, num_slots, width, dtype=torch.int32, device=device)
            self._slots, self._free = {}, list(range(num_slots))
        new = [history for history in histories if history not in self._slots]
        for history in new:
            entries = np.stack([history.ids, history.counts])[:, : history.num_places].astype(np.int32)
            self._table[:, self._free[-1], : history.num_places] = to_device(entries, device)
            self._slots[history] = self._free.pop()
            history.changed = []
        self._slots = {history: self._slots[history] for history in histories}

    def _update(self, histories: Sequence[PenaltyHistory]) -> None:
        """Write the entries that have changed since the last step."""
        slots: list[int] = []
        places: list[int] = []
        ids, counts = [], []
        for history in histories:
            changed = history.changed
            if not changed:
                continue
            slots += [self._slots[history]] * len(changed)
            places += changed
            ids.append(history.ids[changed])
            counts.append(history.counts[changed])
        if slots:
            entries = np.array([slots, places, np.concatenate(ids), np.concatenate(counts)], np.int64)
            moved = to_device(entries, self._table.device)
            self._table[:, moved[0], moved[1]] = moved[2:].to(torch.int32)
        for history in histories:
            history.changed = []


def _parameters(requests: Sequence[tuple[int, SampledRequest]], device: torch.device) -> torch.Tensor:
    columns = [
        (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
        for each in (request.sampling for _, request in requests)
    ]
    return to_device(np.array(columns, np.float32).T.copy(), device)
