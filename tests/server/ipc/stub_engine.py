"""An engine process that computes nothing: once NUM_REQUESTS have come, all their steps are sent at once.

python tests/server/ipc/stub_engine.py NUM_REQUESTS      started by an EngineClient, as the engine is
"""

from __future__ import annotations

import sys

import msgspec
import zmq

from llmservice_server.ipc.engine_process import EngineSettings
from llmservice_server.types.messages import GenerateRequest, Output, Ready, Shutdown, Stats, StepOutputs, ToEngine

READY = Ready(
    max_model_len=512,
    max_num_seqs=16,
    block_size=16,
    num_blocks=512,
    max_request_tokens=512,
    embedding_size=64,
    max_embedding_tokens=512,
    memory_bytes={},
    architecture="LlamaForCausalLM",
    model_code="own",
    load_s=0.0,
)
STATS = Stats(
    num_running={},
    num_waiting={"interactive": 0, "batch": 0},
    blocks_free=512,
    blocks_held=0,
    blocks_cached=0,
    preemptions={},
    prefix_queries=0,
    prefix_hits=0,
    batch_size=0,
    iteration_tokens=0,
    num_admissible=16,
)


def serve(num_requests: int) -> None:
    settings = EngineSettings.decode(sys.stdin.buffer.readline())
    context = zmq.Context()
    outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    outbox.set_hwm(0)
    outbox.connect(settings.from_engine)
    inbox.bind(settings.to_engine)
    outbox.send(msgspec.msgpack.encode(READY))
    requests: list[GenerateRequest] = []
    while not isinstance(message := msgspec.msgpack.decode(inbox.recv(), type=ToEngine), Shutdown):
        if isinstance(message, GenerateRequest):
            requests.append(message)
        if len(requests) == num_requests:
            for step in [msgspec.msgpack.encode(step) for step in _steps(requests)]:
                outbox.send(step)
            requests = []
    context.destroy()


def _steps(requests: list[GenerateRequest]) -> list[StepOutputs]:
    num_steps = requests[0].sampling.max_tokens
    return [
        StepOutputs(
            outputs=[
                Output(
                    request_id=request.request_id,
                    token_ids=[step],
                    finish_reason="length" if step == num_steps - 1 else None,
                )
                for request in requests
            ],
            stats=STATS,
        )
        for step in range(num_steps)
    ]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
