"""What the model is given for a step: the plan's tokens, laid end to end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llmservice_server.attention.base import positions_of
from llmservice_server.attention.slice_columns import SliceColumns
from llmservice_server.engine.plan import Scheduled
from llmservice_server.engine.request import Request

_PADDING = 0  # any token of the vocabulary: what comes of it is dropped


@dataclass(frozen=True, slots=True)
class StepInput:
    """Made column by column, not token by token: this is done for every sequence of every step."""

    token_ids: npt.NDArray[np.int64]  # [num_tokens], padding included
    positions: npt.NDArray[np.int64]  # [num_tokens], each in its own sequence
    slices: SliceColumns
    sampling: Sequence[Request]  # those that are due a token
    last_rows: npt.NDArray[np.int64] | None  # of these, each one's last token; None: they are all the step's tokens

    @classmethod
    def of(cls, scheduled: Sequence[Scheduled]) -> StepInput:
        requests = [share.request for share in scheduled]
        starts = np.array([share.start for share in scheduled], np.int64)
        tables = [request.block_table for request in requests]
        if all([share.samples and share.num_tokens + share.num_padding == 1 for share in scheduled]):  # noqa: C419
            newest = np.array([request.token_ids[-1] for request in requests], np.int64)
            return cls(newest, starts, SliceColumns(starts, np.ones_like(starts), tables), requests, None)
        counts = np.array([share.num_tokens + share.num_padding for share in scheduled], np.int64)
        samples = [share.samples for share in scheduled]
        token_ids: list[int] = []
        for share in scheduled:
            token_ids += share.request.token_ids[share.start : share.start + share.num_tokens]
            token_ids += [_PADDING] * share.num_padding
        last = np.cumsum(counts) - np.array([share.num_padding for share in scheduled], np.int64) - 1
        return cls(
            token_ids=np.array(token_ids, np.int64),
            positions=positions_of(starts, counts)[1],
            slices=SliceColumns(starts, counts, tables),
            sampling=[request for request, due in zip(requests, samples, strict=True) if due],
            last_rows=last[np.array(samples)],
        )

    def last_tokens(self) -> Iterable[tuple[int, Request]]:
        """Where in `token_ids` the last token lies of each request that is due one."""
        places = range(len(self.token_ids)) if self.last_rows is None else self.last_rows.tolist()
        return zip(places, self.sampling, strict=True)

    def without(self, ended: Collection[Request]) -> StepInput:
        """The same tokens, but nothing is drawn for those who have ended."""
        due = [(place, request) for place, request in self.last_tokens() if request not in ended]
        last_rows = np.array([place for place, _ in due], np.int64)
        return replace(self, sampling=[request for _, request in due], last_rows=last_rows)
