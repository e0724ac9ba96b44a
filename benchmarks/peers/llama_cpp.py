"""llama.cpp through its C interface, with continuous batching as in its server."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import llama_cpp
import numpy as np

from peers.workload import Job, PeerRequest, SteppedPeer

_BATCH_TOKENS = 512
_CACHE_TYPES = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": llama_cpp.GGML_TYPE_F16}
"""The KV cache type, as wide as the weights; with 16 bits llama.cpp's default."""


@dataclass(slots=True)
class _Sequence:
    index: int
    request: PeerRequest
    following: list[int]
    """Tokens to compute: the rest of the prompt, later the last sampled one."""
    num_computed: int = 0
    num_drawn: int = 0


class LlamaServer:
    """A step is one `llama_decode`: a token of each decoding sequence, and prompts that fit into the batch."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive, because the library calls it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        model = llama_cpp.llama_model_load_from_file(bytes(job.gguf), llama_cpp.llama_model_default_params())
        context = llama_cpp.llama_init_from_model(model, self._settings(job)) if model else None
        if not model or not context:
            raise RuntimeError(f"llama.cpp cannot run {job.gguf}")
        self._model, self._context = model, context
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._free = list(range(job.in_flight))
        self._running: dict[int, _Sequence] = {}

    @staticmethod
    def _settings(job: Job) -> Any:
        settings = llama_cpp.llama_context_default_params()
        each = -(-job.longest // 256) * 256  # llama.cpp rounds the cells of a sequence up in the same way
        settings.n_ctx = job.in_flight * each
        settings.n_seq_max = job.in_flight
        settings.n_batch = settings.n_ubatch = _BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = job.threads
        settings.type_k = settings.type_v = _CACHE_TYPES[job.dtype]
        settings.kv_unified = True  # otherwise prompts and decodes are computed separately
        return settings

    def add(self, index: int, request: PeerRequest) -> None:
        self._running[self._free.pop()] = _Sequence(index, request, list(request.prompt_token_ids))

    def step(self) -> Sequence[tuple[int, int]]:
        rows = dict(self._fill())
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")
        return [self._draw(place, row) for place, row in rows.items()]

    def _fill(self) -> Iterator[tuple[int, int]]:
        """Fill the batch; yields (sequence, row of the batch) of each sequence that gets a token."""
        self._batch.n_tokens = 0
        room = _BATCH_TOKENS
        for place, sequence in sorted(self._running.items(), key=lambda item: len(item[1].following)):
            taken = sequence.following[:room]
            room -= len(taken)
            for token in taken:
                self._put(token, sequence.num_computed, place)
                sequence.num_computed += 1
            del sequence.following[: len(taken)]
            if not sequence.following and taken:
                row = self._batch.n_tokens - 1
                self._batch.logits[row] = 1
                yield place, row

    def _put(self, token: int, position: int, place: int) -> None:
        row = self._batch.n_tokens
        self._batch.token[row] = token
        self._batch.pos[row] = position
        self._batch.n_seq_id[row] = 1
        self._batch.seq_id[row][0] = place
        self._batch.logits[row] = 0
        self._batch.n_tokens = row + 1

    def _draw(self, place: int, row: int) -> tuple[int, int]:
        """The most likely token of each row; finished sequences release their cells."""
        sequence = self._running[place]
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        sequence.following = [token]
        sequence.num_drawn += 1
        if sequence.num_drawn == sequence.request.output_tokens:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), place, -1, -1)
            del self._running[place]
            self._free.append(place)
        return sequence.index, token

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def peer(job: Job) -> SteppedPeer:
    return SteppedPeer(LlamaServer(job), job)


def q8_0_peer(job: Job) -> SteppedPeer:
    """With weights of 8 bits in blocks of 32."""
    quantized = job.gguf.with_suffix(".q8_0.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    settings.allow_requantize = True
    if llama_cpp.llama_model_quantize(bytes(job.gguf), bytes(quantized), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp cannot quantise {job.gguf}")
    return peer(replace(job, gguf=quantized))
