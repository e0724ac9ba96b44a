"""This project's engine with default settings, in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmservice_server import LLM
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from peers.workload import Job, PeerRequest, SteppedPeer


class OurEngine:
    def __init__(self, job: Job, **settings: Any) -> None:
        self._llm = LLM(
            job.model,
            dtype=job.dtype,
            max_num_seqs=job.in_flight,
            max_model_len=job.longest,
            expected_tokens=job.longest,
            threads=job.threads,
            **settings,
        )

    def add(self, index: int, request: PeerRequest) -> None:
        sampling = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        self._llm.engine.add(
            GenerateRequest(
                request_id=str(index), prompt_token_ids=request.prompt_token_ids, sampling=sampling, arrival_s=0.0
            )
        )

    def step(self) -> Sequence[tuple[int, int]]:
        outputs = self._llm.engine.step().outputs
        return [(int(output.request_id), token) for output in outputs for token in output.token_ids]

    def close(self) -> None:
        del self._llm


def peer(job: Job) -> SteppedPeer:
    return SteppedPeer(OurEngine(job), job)


def int8_peer(job: Job) -> SteppedPeer:
    return SteppedPeer(OurEngine(job, quantization="int8"), job)


def peer_by_transformers(job: Job) -> SteppedPeer:
    return SteppedPeer(OurEngine(job, implementation="transformers"), job)
