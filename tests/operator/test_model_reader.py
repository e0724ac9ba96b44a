from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from pydantic import ValidationError
from safetensors.numpy import save

from llmservice_operator import model_reader
from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.locations import Figures, Model, ModelSourceError
from llmservice_operator.model_reader import ModelReader

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
PACKED = {
    **CONFIG,
    "model_type": "not-known",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
}
OTHERS = {"packed": PACKED, "unlisted": PACKED, "encoder": {"model_type": "bert", "torch_dtype": "float32"}}
"""By the names of their repositories."""
FILES = {
    "model-00001-of-00002.safetensors": 3000,
    "model-00002-of-00002.safetensors": 1000,
    "consolidated.safetensors": 4000,
    "original/model.safetensors": 4000,
    "pytorch_model.bin": 4000,
}
SHARDS = {
    "model-1.safetensors": save({"model.embed_tokens.weight": np.zeros((512, 64), np.float16)}),
    "model-2.safetensors": save(
        {
            "model.layers.0.mlp.up_proj.qweight": np.zeros((64, 128 // 8), np.int32),
            "model.layers.0.mlp.up_proj.scales": np.zeros((1, 128), np.float16),
        }
    ),
}
"""Of `packed`."""
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A --file-models-root with one model in it."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "models"


APART = {
    "modelopt": {"hf_quant_config": {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}},
    "gptq": {"quantize_config": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}},
}
"""By repository, what is said of its weights in a file of its own."""


async def sentences(_: web.Request) -> web.Response:
    return web.json_response({"max_seq_length": 256})


@pytest.fixture
async def hub() -> AsyncIterator[str]:
    """A model hub: org/good, org/gated, org/broken, org/slow; anything else is not there."""

    async def answer(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == "gated" and request.headers.get("Authorization") != "Bearer sesame":
            return web.Response(status=401)
        if name == "slow":
            await asyncio.sleep(30)
        if name == "broken":
            return web.Response(text="{")
        if name in OTHERS:
            return web.json_response(OTHERS[name])
        known = name in {"good", "gated", "failing", *APART}
        return web.json_response(CONFIG) if known else web.Response(status=404)

    async def sidecar(request: web.Request) -> web.Response:
        name, file = request.match_info["name"], request.match_info["file"]
        if (found := APART.get(name, {}).get(file)) is not None:
            return web.json_response(found)
        return web.Response(status=503 if (name, file) == ("failing", "hf_quant_config") else 404)

    async def listing(request: web.Request) -> web.Response:
        siblings = [{"rfilename": name, "size": size} for name, size in FILES.items()]
        return web.json_response({"siblings": siblings if "blobs" in request.query else []})

    all_asked = asyncio.Barrier(len(SHARDS))  # one after another, the headers of a large checkpoint take long

    async def weights(request: web.Request) -> web.Response:
        await all_asked.wait()
        return web.Response(body=SHARDS[request.match_info["file"]])

    async def shards(request: web.Request) -> web.Response:
        siblings = [{"rfilename": name, "size": len(content)} for name, content in SHARDS.items()]
        return web.json_response({"siblings": siblings})

    app = web.Application()
    app.router.add_get("/org/packed/resolve/{revision}/{file:model-.*}", weights)
    app.router.add_get("/api/models/org/packed/revision/{revision}", shards)
    app.router.add_get("/org/{name}/resolve/{revision}/config.json", answer)
    app.router.add_get("/api/models/org/good/revision/{revision}", listing)
    app.router.add_get("/org/encoder/resolve/{revision}/sentence_bert_config.json", sentences)
    app.router.add_get("/org/{name}/resolve/{revision}/{file:.*quant.*_config}.json", sidecar)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def read(
    source: dict[str, Any],
    hub: str,
    *,
    root: Path | None = None,
    token: str | None = None,
    known: Figures | None = None,
) -> Model:
    async with aiohttp.ClientSession() as session:
        timeout_s = 0.3 if "slow" in source["uri"] else 10.0  # the other answers may wait for a busy CPU
        reader = ModelReader(session, root, hub, token, timeout_s)
        return await reader.read(ModelSource.model_validate(source), known)


async def test_a_local_folder_is_read(models: Path, hub: str) -> None:
    model = await read({"uri": "file:///tiny"}, hub, root=models)

    assert model.location.path == str(models / "tiny")
    assert (model.shape.layers, model.shape.kv_heads) == (2, 2)


@pytest.mark.parametrize(("name", "form"), [("modelopt", "modelopt/float4/1x16"), ("gptq", "gptq/int4/1x128")])
async def test_a_hub_model_whose_quantisation_is_described_apart(hub: str, name: str, form: str) -> None:
    model = await read({"uri": f"hf://org/{name}@main"}, hub)

    assert model.shape is not None
    assert model.shape.quantization == form
    with pytest.raises(ModelSourceError, match=r"hf_quant_config.json answers 503"):  # not for good as unquantised
        await read({"uri": "hf://org/failing@main"}, hub)


async def test_the_longest_input_of_an_encoder_is_that_of_sentence_transformers(hub: str) -> None:
    model = await read({"uri": "hf://org/encoder"}, hub)

    assert (model.shape.default_model_len, model.shape.max_position_embeddings) == (256, 512)


async def test_a_hub_model_is_read_without_downloading_it(hub: str) -> None:
    model = await read({"uri": "hf://org/good@main"}, hub)

    assert model.shape is not None
    assert model.shape.vocab_size == 512
    assert (model.figures_from, model.weights_file_bytes, model.weights_bytes) == ("config", 4000, 4000)
    assert (model.location.fetch_uri, model.location.hf_endpoint) == ("hf://org/good@main", hub)


@pytest.mark.parametrize("uri", ["file:///tiny", "hf://org/good@main"])
async def test_overrides_change_what_is_read(uri: str, models: Path, hub: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100_000}
    model = await read({"uri": uri, "configOverrides": {"rope_scaling": yarn}}, hub, root=models)
    assert model.shape is not None
    assert model.shape.max_position_embeddings == 400_000


def test_overrides_that_are_nested_too_deep_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):  # json.dumps and `patched` recurse
        deep = {"a": deep}
    with pytest.raises(ValidationError, match="configOverrides is nested in more than 16 levels"):
        ModelSource.model_validate({"uri": "hf://org/good", "configOverrides": deep})


async def test_files_of_another_type_say_nothing_of_the_loaded_size(hub: str) -> None:
    model = await read({"uri": "hf://org/good", "dtype": "bfloat16"}, hub)

    assert (model.weights_file_bytes, model.weights_bytes) == (4000, None)


@pytest.mark.parametrize("uri", ["pvc://claim/model", "s3://bucket/model", "oci://registry/model:1"])
async def test_models_that_only_a_pod_can_read_are_not_requested(uri: str, hub: str) -> None:
    model = await read({"uri": uri}, hub)

    assert (model.shape, model.figures_from) == (None, "pod")


async def test_a_gated_model_with_a_secret_is_left_to_the_pod_that_has_it(hub: str) -> None:
    model = await read({"uri": "hf://org/gated", "secretRef": {"name": "token"}}, hub)

    assert (model.shape, model.figures_from) == (None, "pod")


async def test_headers_are_parsed_by_threads(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large checkpoint take seconds, in which the event loop has a Lease to renew."""
    in_loop: set[bool] = set()

    def loads(text: str | bytes, original: Callable[..., Any] = json.loads, **options: Any) -> Any:
        if isinstance(text, bytes) and b"data_offsets" in text:
            in_loop.add(threading.current_thread() is threading.main_thread())
        return original(text, **options)

    monkeypatch.setattr(json, "loads", loads)
    await read({"uri": "hf://org/packed"}, hub)
    assert in_loop == {False}


@pytest.mark.parametrize("uri", ["file:///tiny", "hf://org/packed"])
async def test_quantised_weights_of_an_unknown_family_are_counted_from_headers(
    uri: str, models: Path, hub: str
) -> None:
    (models / "tiny" / "config.json").write_text(json.dumps(PACKED))
    for name, content in SHARDS.items():
        (models / "tiny" / name).write_bytes(content)

    model = await read({"uri": uri, "configOverrides": {"torch_dtype": None}}, hub, root=models)

    assert (model.figures_from, model.weights_bytes) == ("config", None)
    assert model.shape.dtype == "float16"  # which config.json does not name
    assert model.shape.weights_bytes("float32", "dense") == 4 * (512 * 64 + 128 * 64)
    assert model.shape.weights_bytes("float32", "stored") == 4 * 512 * 64 + 128 * 64 // 2 + 128 * (2 + 1)


@pytest.mark.parametrize("uri", ["file:///tiny", "hf://org/unlisted"])
async def test_quantised_weights_without_headers_are_sized_by_the_server(uri: str, models: Path, hub: str) -> None:
    (models / "tiny" / "config.json").write_text(json.dumps(PACKED))

    model = await read({"uri": uri}, hub, root=models)

    assert model.figures_from == "pod"


async def test_headers_that_are_too_large_are_left_to_the_server(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_reader, "_HEADERS_LIMIT_BYTES", 100)

    assert (await read({"uri": "hf://org/packed"}, hub)).figures_from == "pod"


async def test_known_figures_are_not_requested_again(hub: str) -> None:
    shape = (await read({"uri": "hf://org/good"}, hub)).shape
    known = Figures("pod", shape, 4000)

    assert (await read({"uri": "hf://org/absent"}, hub, known=known)).figures == known


async def test_given_figures_spare_the_hub(hub: str) -> None:
    model = await read({"uri": "hf://org/absent", "shape": SHAPE}, hub)

    assert model.shape is not None
    assert (model.shape.kv_heads, model.figures_from) == (4, "spec")


@pytest.mark.parametrize(
    ("source", "reason", "advice", "lasting"),
    [
        ({"uri": "hf://org/absent"}, "ModelNotFound", "correct model.uri", False),
        ({"uri": "hf://org/gated"}, "ModelForbidden", "spec.model.secretRef", False),
        ({"uri": "hf://org/broken"}, "ModelUnreadable", "is not JSON", True),
        ({"uri": "hf://org/slow"}, "ModelUnreachable", "check the operator's network", False),
        ({"uri": "file:///absent"}, "ModelNotFound", "correct model.uri", False),
    ],
)
async def test_the_error_of_an_unreadable_model_says_what_to_change(
    source: dict[str, Any], reason: str, advice: str, lasting: bool, models: Path, hub: str
) -> None:
    with pytest.raises(ModelSourceError, match=advice) as refused:
        await read(source, hub, root=models)
    assert (refused.value.reason, refused.value.lasting) == (reason, lasting)


async def test_the_operators_token_reads_a_gated_model_and_is_never_shown(hub: str) -> None:
    assert (await read({"uri": "hf://org/gated"}, hub, token="sesame")).shape.layers == 2

    with pytest.raises(ModelSourceError) as refused:
        await read({"uri": "hf://org/gated"}, hub, token="wrong-token")
    assert "wrong-token" not in str(refused.value)


async def test_white_space_around_the_operators_token_is_removed_and_no_other_refused(hub: str) -> None:
    assert (await read({"uri": "hf://org/gated"}, hub, token=" sesame\n")).shape.layers == 2

    for token in ("ses\name", "sésame"):
        with pytest.raises(ModelSourceError, match="HF_TOKEN has characters that are not printable ASCII") as refused:
            await read({"uri": "hf://org/gated"}, hub, token=token)
        assert token not in str(refused.value)
