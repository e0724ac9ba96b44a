"""The HTTP process with a stub engine (stub_engine.py), on loopback.

python benchmarks/stub_server.py MODEL PERIOD_S NUM_SEQS [TOKEN_S NUM_TOKENS_EACH]      logs its ports as `llmservice
serve` does; the engine's settings are those of stub_engine.py
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from llmservice_server.engine.admission_queue import QueueBound
from llmservice_server.engine.config import EngineConfig
from llmservice_server.http.server import HttpProcess, ListenConfig
from llmservice_server.http.state import ServeConfig
from llmservice_server.ipc import json_log

STUB_ENGINE = str(Path(__file__).with_name("stub_engine.py"))
MODEL_NAME = "stub"


async def serve(model: Path, period_s: str, num_seqs: str, *engine: str) -> None:
    bound = QueueBound(max_requests=10 * int(num_seqs), max_prompt_tokens=1_000_000)
    config = ServeConfig(
        served_model_names=(MODEL_NAME,),
        queue_bounds={"interactive": bound, "batch": bound},
        request_timeout_s=600.0,
        queue_timeout_s=None,
    )
    listen = ListenConfig(host="127.0.0.1", port=0, metrics_port=0, drain_timeout_s=1.0, metrics_prefix="llmservice_")
    command = (sys.executable, STUB_ENGINE, period_s, num_seqs, *engine)
    await HttpProcess(EngineConfig(model=model), config, listen, "info", command).run()


if __name__ == "__main__":
    json_log.configure("info")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
