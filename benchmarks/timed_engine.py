"""An engine process of pieces/timed_model.py.

python benchmarks/timed_engine.py SETTINGS LOADED_S      started by timed_server.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from llmservice_planner.sizing.latency import LatencyModel
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.ipc.engine_process import main
from llmservice_server.tiny.tokenizer import printable_ids
from pieces.timed_model import timed_engine


def make(config: EngineConfig) -> Engine:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))
    time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
    model = LatencyModel.from_dict(settings["latency"])
    return timed_engine(config, model, settings["num_blocks"], printable_ids(tokenizer), tokenizer.get_vocab_size())


if __name__ == "__main__":
    raise SystemExit(main(make))
