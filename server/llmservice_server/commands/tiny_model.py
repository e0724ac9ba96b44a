"""`llmservice make-tiny-model DIR`: write a tiny checkpoint to try everything with, no download needed."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from llmservice_planner.command import Command, CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="where to write the checkpoint; created when missing")
    add("--layers", type=int, default=4, help="decoder layers")
    add("--hidden-size", type=int, default=256, help="width of the residual stream")
    add("--heads", type=int, default=8, help="attention heads")
    add("--kv-heads", type=int, default=4, help="key and value heads; must divide --heads")
    add("--vocab-size", type=int, default=1024, help="rows of the embedding; the tokenizer has at most as many")
    add("--max-position-embeddings", type=int, default=2048, help="longest context in tokens")
    add("--seed", type=int, default=0, help="seed of the random weights")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="type of the weights")


def run(args: argparse.Namespace) -> int:
    from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

    try:
        spec = TinyModelSpec(**{each.name: getattr(args, each.name) for each in fields(TinyModelSpec)})
        write_tiny_model(args.directory, spec)
    except ValueError as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError("a model of this size does not fit into memory: choose a smaller one") from error
    except OSError as error:
        raise CommandError(f"cannot write {args.directory}: {error.strerror or error}") from error
    print(f"{args.directory}: {spec.layers} layers of {spec.hidden_size}, vocabulary {spec.vocab_size}, {spec.dtype}")
    return 0


COMMAND = Command(
    help="write a tiny random Llama checkpoint with a trained tokenizer (for demos and tests)",
    add_arguments=add_arguments,
    run=run,
    extra="server",
    requires=("numpy", "tokenizers"),
)
