"""An engine process with a model that computes nothing and steps at a given pace, to measure the HTTP process.

python benchmarks/stub_engine.py PERIOD_S NUM_SEQS [TOKEN_S NUM_TOKENS_EACH]      started by the HTTP process
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer

from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.ipc.engine_process import main
from llmservice_server.tiny.tokenizer import printable_ids
from pieces.empty_engine import EmptyModel, empty_engine

NUM_TOKENS_EACH = 1024


def stub_engine(config: EngineConfig) -> Engine:
    """An engine that generates printable tokens of the model's tokenizer, one per sequence every PERIOD_S.

    A step takes TOKEN_S more for each of its tokens; the cache has room for NUM_TOKENS_EACH of each sequence.
    """
    torch.set_num_threads(1)
    token_s, num_tokens_each = map(float, sys.argv[3:5] or (0, NUM_TOKENS_EACH))
    tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))
    model = EmptyModel(tokenizer.get_vocab_size(), printable_ids(tokenizer), float(sys.argv[1]), token_s)
    return empty_engine(model, int(sys.argv[2]), int(num_tokens_each))


if __name__ == "__main__":
    raise SystemExit(main(stub_engine))
