"""An engine process whose model computes nothing, at a pace: what the HTTP path is measured with.

python benchmarks/stub_engine.py PERIOD_S NUM_SEQS      started by the HTTP process, as the engine is
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer

from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine_process import main
from llmservice_server.tiny.tokenizer import printable_ids
from pieces.empty_engine import EmptyModel, empty_engine

NUM_TOKENS_EACH = 1024


def stub_engine(config: EngineConfig) -> Engine:
    """Speaks in words of the tokenizer in the folder `config.model`, one token for each sequence every PERIOD_S."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))
    model = EmptyModel(tokenizer.get_vocab_size(), printable_ids(tokenizer), period_s=float(sys.argv[1]))
    return empty_engine(model, int(sys.argv[2]), NUM_TOKENS_EACH)


if __name__ == "__main__":
    raise SystemExit(main(stub_engine))
