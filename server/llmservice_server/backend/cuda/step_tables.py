"""What the GPU kernels need to know of a step, as integers: made on the host, brought over in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llmservice_server.backend.base import Int32Array, StepInput

_ALIGNMENT = 4  # int32 numbers: Triton compiles other kernels for pointers that are no multiple of 16 bytes
_TABLE_STEP = 16  # likewise for strides that are no multiple of 16


@dataclass(frozen=True, slots=True)
class StepTables:
    """The arguments of the kernels, made of a `StepInput`.

    Sequences with one token are apart from those with several (chunks).
    """

    slots: Int32Array  # [num_tokens]
    decode_rows: Int32Array  # [num_decodes] which of the tokens it is
    decode_lengths: Int32Array  # [num_decodes] keys that it sees, its own included
    decode_tables: Int32Array  # [num_decodes, blocks], filled up with the null block
    chunks: Int32Array  # [num_chunks, 3] first row, position of the first token, tokens
    chunk_tables: Int32Array  # [num_chunks, blocks], filled up with the null block

    @classmethod
    def of(cls, step: StepInput, block_size: int) -> StepTables:
        starts, counts, rows = step.starts, step.counts, step.rows
        tables = padded_tables(step)
        alone = counts == 1
        return cls(
            slots=step.slots(block_size).astype(np.int32),
            decode_rows=rows[alone].astype(np.int32),
            decode_lengths=(starts[alone] + 1).astype(np.int32),
            decode_tables=tables[alone],
            chunks=np.stack([rows, starts, counts], axis=1)[~alone].astype(np.int32),
            chunk_tables=tables[~alone],
        )


def table_width(num_blocks: int) -> int:
    """Of a row that holds so many blocks."""
    return -(-num_blocks // _TABLE_STEP) * _TABLE_STEP


def padded_tables(step: StepInput) -> Int32Array:
    """The step's block tables, one a row, all as wide as the longest, or wider, so that the width seldom changes."""
    lengths = np.diff(np.append(step.table_firsts, len(step.blocks)))
    width = table_width(int(lengths.max(initial=0)))
    rows = np.zeros((len(lengths), width), np.int32)
    rows[np.arange(width) < lengths[:, None]] = step.blocks
    return rows


def to_device(arrays: Sequence[Int32Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, in one transfer, which a GPU does beside its other work."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.size // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.size] = array.ravel()
    moved = packed.to(device, non_blocking=True)
    return [moved[start : start + array.size].view(array.shape) for array, start in zip(arrays, starts, strict=True)]
