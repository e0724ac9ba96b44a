from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.model_source import Model, ModelReader, ModelSourceError, locate
from llmservice_operator.spec import ModelSource

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
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A --file-models-root with one model in it."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "models"


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
        return web.json_response(CONFIG) if name in {"good", "gated"} else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/org/{name}/resolve/{revision}/config.json", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def read(source: dict[str, Any], hub: str, *, root: Path | None = None, token: str | None = None) -> Model:
    async with aiohttp.ClientSession() as session:
        reader = ModelReader(session, root, hub, token, timeout_s=0.3)
        return await reader.read(ModelSource.model_validate(source))


@pytest.mark.parametrize(
    ("uri", "path", "claim"),
    [
        ("hf://org/name", "/models/name", None),
        ("hf://org/name@v1.0", "/models/name", None),
        ("pvc://claim", "/models", "claim"),
        ("pvc://my-claim/some/model", "/models/some/model", "my-claim"),
    ],
)
def test_a_uri_says_where_the_pod_finds_the_model(uri: str, path: str, claim: str | None) -> None:
    location = locate(uri, None)

    assert (location.path, location.claim) == (path, claim)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("s3://bucket/model", "UnsupportedURI"),
        ("oci://registry/model", "UnsupportedURI"),
        ("hf://only-a-name", "InvalidURI"),
        ("hf://org/../name", "InvalidURI"),
        ("hf://org/name\n", "InvalidURI"),
        ("pvc://claim/../../etc", "InvalidURI"),
        ("pvc://Claim", "InvalidURI"),
        ("file:///tiny", "FileModelsDisabled"),
    ],
)
def test_a_uri_that_cannot_work_is_refused_with_a_reason(uri: str, reason: str) -> None:
    with pytest.raises(ModelSourceError) as refused:
        locate(uri, None)
    assert refused.value.reason == reason


@pytest.mark.parametrize("uri", ["file:///../secret", "file:///tiny/../../x", "file:///.", "file:////etc/passwd"])
def test_a_file_uri_never_leaves_its_root(uri: str, models: Path) -> None:
    with pytest.raises(ModelSourceError) as refused:
        locate(uri, models)
    assert refused.value.reason == "InvalidURI"


def test_a_link_out_of_the_root_is_refused(models: Path, tmp_path: Path) -> None:
    (models / "link").symlink_to(tmp_path)

    with pytest.raises(ModelSourceError) as refused:
        locate("file:///link/elsewhere", models)
    assert refused.value.reason == "InvalidURI"


async def test_a_local_folder_is_read(models: Path, hub: str) -> None:
    model = await read({"uri": "file:///tiny"}, hub, root=models)

    assert model.location.path == str(models / "tiny")
    assert (model.shape.layers, model.shape.kv_heads) == (2, 2)


async def test_a_hub_model_is_read_without_downloading_it(hub: str) -> None:
    model = await read({"uri": "hf://org/good@main"}, hub)

    assert model.shape.vocab_size == 512
    assert model.location.fetch_uri == "hf://org/good@main"


async def test_given_figures_spare_the_hub(hub: str) -> None:
    model = await read({"uri": "hf://org/absent", "shape": SHAPE}, hub)

    assert model.shape.kv_heads == 4


@pytest.mark.parametrize(
    ("source", "reason", "advice", "lasting"),
    [
        ({"uri": "hf://org/absent"}, "ModelNotFound", "correct model.uri", False),
        ({"uri": "hf://org/gated"}, "ModelForbidden", "spec.model.shape", False),
        ({"uri": "hf://org/broken"}, "ModelUnreadable", "is not JSON", True),
        ({"uri": "hf://org/slow"}, "ModelUnreachable", "check the operator's network", False),
        ({"uri": "pvc://claim/model"}, "ShapeUnknown", "spec.model.shape", True),
        ({"uri": "file:///absent"}, "ModelNotFound", "correct model.uri", False),
    ],
)
async def test_a_model_that_cannot_be_read_says_what_to_change(
    source: dict[str, Any], reason: str, advice: str, lasting: bool, models: Path, hub: str
) -> None:
    with pytest.raises(ModelSourceError, match=advice) as refused:
        await read(source, hub, root=models)
    assert (refused.value.reason, refused.value.lasting) == (reason, lasting)


async def test_the_operators_token_opens_a_gated_model_and_is_never_told(hub: str) -> None:
    assert (await read({"uri": "hf://org/gated"}, hub, token="sesame")).shape.layers == 2

    with pytest.raises(ModelSourceError) as refused:
        await read({"uri": "hf://org/gated"}, hub, token="wrong-token")
    assert "wrong-token" not in str(refused.value)
