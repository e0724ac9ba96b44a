"""The tiny checkpoint: the same bytes every time, loadable by transformers, and readable when sampled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmservice_planner.command import main
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

SMALL = TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=512, max_position_embeddings=256)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_runs_in_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    llmservice = Path(sys.executable).with_name("llmservice")
    command = [llmservice, "make-tiny-model", "--layers", "2", "--hidden-size", "64"]
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        subprocess.run([*command, tmp_path / hash_seed], check=True, env=environment)
    first, second = _files(tmp_path / "1"), _files(tmp_path / "2")
    assert first == second
    assert set(first) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transformers_loads_the_checkpoint_whole(tmp_path: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    write_tiny_model(tmp_path, TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, dtype=dtype))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)


def test_bfloat16_weights_are_the_float32_ones_rounded(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    for dtype in ("float32", "bfloat16"):
        write_tiny_model(tmp_path / dtype, TinyModelSpec(layers=1, hidden_size=64, heads=4, kv_heads=2, dtype=dtype))
    full, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    for name, tensor in full.items():
        assert torch.equal(tensor.to(torch.bfloat16), rounded[name]), name


def test_sampled_text_is_varied_and_printable(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(tmp_path, SMALL)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([tokenizer("How are you?").input_ids])
    torch.manual_seed(0)
    sampled = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=64, pad_token_id=0
    )[0, prompt.shape[1] :]
    text = tokenizer.decode(sampled)
    assert len(sampled) == 64
    assert len(set(sampled.tolist())) > 24
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "\ufffd" not in text


@pytest.mark.parametrize("text", ["Hello, world!", "Grüße aus 日本 🎉", "x\t=\r\n  1\x00", ""])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = tiny_tokenizer.train(1024)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_encoding_puts_the_begin_token_in_front() -> None:
    tokenizer = tiny_tokenizer.train(1024)
    assert tokenizer.encode("one").ids[0] == tokenizer.token_to_id(tiny_tokenizer.BOS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 6}, "hidden_size 256"),
        ({"kv_heads": 3}, "no multiple of kv_heads 3"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModelSpec(**wrong)  # type: ignore[arg-type]


def test_a_model_larger_than_memory_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-tiny-model", str(tmp_path), "--hidden-size", "1000000000"]) == 2
    assert "does not fit into memory" in capsys.readouterr().err


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small"):
        write_tiny_model(tmp_path / "model", TinyModelSpec(vocab_size=200))
