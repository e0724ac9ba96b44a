"""Broken model folders: each ends in one sentence that names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmservice_planner.model.shape import ModelShape
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.weight_files import stored_tensors
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.checkpoint_config import eos_token_ids
from llmservice_server.types.errors import ModelLoadError

CPU = torch.device("cpu")
NORM = "model.layers.1.input_layernorm.weight"
Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("intact")
    spec = TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512, max_position_embeddings=64)
    write_tiny_model(folder, spec)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path, intact: dict[str, bytes]) -> Path:
    for name, content in intact.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def load(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.load(checkpoint.dtype("auto"), CPU)


def states(folder: Path) -> torch.Tensor:
    """What the loaded model makes of a few tokens; every weight has its part in it but attention, which is left out."""
    model = Checkpoint.open(folder).load(torch.float32, CPU)
    tokens = torch.arange(10, 20)
    with torch.inference_mode():
        attended = model.forward(tokens, tokens, lambda _, query, key_value, *__: query.flatten(1) + key_value.mean())
        return model.logits(attended)


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_that_differs_from_the_embedding_is_used_although_config_ties_it(
    folder: Path, caplog: pytest.LogCaptureFixture, differs: bool
) -> None:
    change_tensors(
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * (1 + differs)})
    )(folder)
    set_config(tie_word_embeddings=False)(folder)
    expected = states(folder)
    set_config(tie_word_embeddings=True)(folder)
    caplog.clear()
    assert torch.equal(states(folder), expected)
    assert ("lm_head.weight that differs" in caplog.text) is differs
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.tied_embeddings is not differs
    shape = ModelShape.from_folder(folder)
    assert shape.tie_word_embeddings is not differs
    held = checkpoint.load(torch.float32, CPU).weight_bytes
    assert (
        held == checkpoint.held_bytes(torch.float32, "auto", on_cpu=True) == shape.weights_bytes("float32", on_cpu=True)
    )


def set_config(**changes: Any) -> Break:
    """Change config.json; None removes a key."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def shard(folder: Path) -> None:
    """Split the weights over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def keep_a_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("blobs/0")


def corrupt_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def corrupt_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


BREAKS: dict[str, tuple[Break, str]] = {
    "a lost shard": (lose_a_shard, "lacks b.safetensors, which its index names"),
    "a corrupt index": (corrupt_index, "index.json has no readable weight_map"),
    "pickled weights only": (only_pickles, r"pickles only \(pytorch_model.bin\).*convert them to safetensors"),
    "GGUF only": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-Q4_K_M.gguf"),
        r"holds no \*.safetensors file, only model-Q4_K_M.gguf, which is not served",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no .*safetensors file"),
    "a link to no file": (keep_a_link, "lacks model.safetensors, which is a folder or a link to no file"),
    "a truncated file": (truncate, "not a readable safetensors file"),
    "corrupt JSON": (corrupt_config, "config.json cannot be read as JSON"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "a missing tensor": (
        change_tensors(lambda tensors: tensors.pop(NORM)),
        rf"1 tensors that LlamaForCausalLM needs .* {NORM}",
    ),
    "a tensor of the wrong shape": (
        change_tensors(lambda tensors: tensors.update({NORM: torch.ones(31)})),
        rf"{NORM} has the shape \[31\], config.json makes it \[32\]",
    ),
    "a tensor without a place": (
        change_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
        "holds model.layers.0.self_attn.q_proj.bias, which LlamaForCausalLM with this config.json has no place for",
    ),
    "an unknown architecture": (
        set_config(architectures=["OwnForCausalLM"]),
        "OwnForCausalLM cannot be served: transformers has no model of this name.*Qwen3ForCausalLM",
    ),
    "a classifier of a family whose scores are not computed": (
        set_config(model_type="olmo2", architectures=["Olmo2ForSequenceClassification"]),
        "Olmo2ForSequenceClassification cannot be served: the server computes the scores of the model types llama, ",
    ),
    "no architecture": (set_config(architectures=None), r"the architecture \(none\), supported are"),
    "architectures that are no names": (
        set_config(architectures=[7]),
        r"architectures is \[7\], expected a list of names",
    ),
    "a missing key": (set_config(intermediate_size=None), "config.json has no intermediate_size"),
    "a key that makes no sense": (
        set_config(num_hidden_layers="many"),
        "num_hidden_layers is 'many', expected a valid integer",
    ),
    "heads that do not divide": (set_config(num_key_value_heads=3), "4 attention heads cannot share 3 key-value heads"),
    "a quantized checkpoint": (set_config(quantization_config={"bits": 4}), "quantised by None, supported are"),
    "a checkpoint of MLX": (
        set_config(quantization={"group_size": 64, "bits": 4}),
        "quantised by 'mlx', supported are",
    ),
    "another activation": (set_config(hidden_act="gelu"), "hidden_act is 'gelu', expected 'silu'"),
    "a rope that we do not have": (
        set_config(rope_parameters={"rope_type": "longrope", "factor": 4.0}),
        "rope type 'longrope' is not supported, expected one of default, linear",
    ),
    "a rope without its numbers": (
        set_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        "rope type 'llama3' needs low_freq_factor, high_freq_factor",
    ),
    "a dtype that we do not run": (set_config(dtype="float8_e4m3fn"), "dtype is 'float8_e4m3fn'.*--dtype"),
}


@pytest.mark.parametrize(("broken", "message"), BREAKS.values(), ids=BREAKS)
def test_a_broken_folder_is_refused_in_one_sentence(folder: Path, broken: Break, message: str) -> None:
    broken(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder"):
        load(tmp_path / "nowhere")


def test_a_weight_file_that_cannot_be_opened_is_refused(folder: Path) -> None:
    """As one that the server's user may not read, which root may."""
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors is not a readable safetensors file"):
        stored_tensors([folder / "gone.safetensors"])


def test_a_pickle_beside_safetensors_is_never_opened(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"would run code if it were unpickled")
    load(folder)


def test_shards_load_to_the_same_weights_as_one_file(folder: Path) -> None:
    whole = states(folder)
    shard(folder)
    assert torch.equal(states(folder), whole)


@pytest.mark.parametrize("whole", ["model.safetensors", "renamed.safetensors"])
def test_the_same_weights_in_their_authors_layout_are_not_loaded(folder: Path, whole: str) -> None:
    (folder / "model.safetensors").rename(folder / whole)
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, folder / "consolidated.safetensors")
    load(folder)


def test_leftovers_of_old_exporters_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(lambda tensors: tensors.update({name: torch.ones(4)}))(folder)
    load(folder)


@pytest.mark.parametrize(
    ("wanted", "named", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "torch.float16", torch.float16),
        ("auto", None, torch.float32),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_the_dtype_is_the_checkpoints_own_unless_another_is_wanted(
    folder: Path, wanted: str, named: str | None, expected: torch.dtype
) -> None:
    set_config(dtype=None, torch_dtype=named)(folder)
    assert Checkpoint.open(folder).dtype(wanted) == expected


def test_without_a_named_dtype_it_is_that_of_most_weights(folder: Path) -> None:
    set_config(dtype=None, torch_dtype=None)(folder)
    change_tensors(
        lambda tensors: tensors.update(
            {name: each.bfloat16() for name, each in tensors.items() if not name.endswith("norm.weight")}
        )
    )(folder)
    assert Checkpoint.open(folder).dtype("auto") == torch.bfloat16
    assert ModelShape.from_folder(folder).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("generation", "expected"), [(None, {7}), ({"eos_token_id": [8, 9]}, {8, 9}), ({"eos_token_id": 8}, {8}), ({}, {7})]
)
def test_end_of_sequence_tokens_come_from_the_generation_config_first(
    folder: Path, generation: dict[str, Any] | None, expected: set[int]
) -> None:
    set_config(eos_token_id=7)(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Checkpoint.open(folder).eos_token_ids == expected


def test_end_of_sequence_tokens_may_be_those_of_the_language_model(folder: Path) -> None:
    set_config(eos_token_id=None, text_config={"eos_token_id": [1, 106]})(folder)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == {1, 106}
