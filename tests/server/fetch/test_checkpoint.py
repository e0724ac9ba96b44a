"""Checkpoints from a folder, a hub and a store: the files that are fetched, and the errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from harness.stores.model_hub import COMMIT, ModelHub
from harness.stores.object_store import ObjectStore
from llmservice_server.fetch.checkpoint import fetch, needed
from llmservice_server.fetch.download import FetchOptions
from llmservice_server.fetch.source import FetchError

LLMSERVICE = Path(sys.executable).with_name("llmservice")
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]

Fetched = Callable[[str], dict[str, bytes]]


@pytest.mark.parametrize("uri", ["hf://org/open", "hf://org/open@v1"])
def test_a_repository_is_fetched_without_pickles_and_duplicates(hub: ModelHub, fetched: Fetched, uri: str) -> None:
    assert fetched(uri) == {name: hub.files[name] for name in WANTED}
    paths = [request.path for request in hub.seen if "/org/open/" in request.path]
    assert not any("pytorch_model.bin" in path or "consolidated" in path for path in paths)
    assert paths[0].endswith("/v1" if "@" in uri else "/main")
    assert f"/org/open/resolve/{COMMIT}/config.json" in paths


@pytest.mark.parametrize("token", ["hf_secret", " hf_secret\r\n"])
def test_a_gated_repository_is_fetched_with_a_token(
    hub: ModelHub, fetched: Fetched, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert sorted(fetched("hf://org/gated")) == WANTED
    assert {request.authorization for request in hub.seen} == {"Bearer hf_secret"}


def test_a_complete_folder_needs_no_request(hub: ModelHub, fetched: Fetched) -> None:
    fetched("hf://org/open")
    hub.seen.clear()
    assert sorted(fetched("hf://org/open")) == WANTED
    assert hub.seen == []


def test_a_missing_file_is_fetched_again(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    fetched("hf://org/open")
    (tmp_path / "model" / "tokenizer.json").unlink()
    hub.sent.clear()
    assert sorted(fetched("hf://org/open")) == WANTED
    assert set(hub.sent) <= {"", "tokenizer.json"}  # the list of files, and the one


def test_partial_files_of_an_earlier_version_are_deleted(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    stale = tmp_path / "model" / ".model.safetensors.0123456789ab.part"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    assert fetched("hf://org/open")["model.safetensors"] == hub.files["model.safetensors"]
    assert not stale.exists()


def test_files_that_the_new_version_lacks_are_deleted(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    weights = hub.files.pop("model.safetensors")
    hub.files |= {"model-00001-of-00001.safetensors": weights, "model.safetensors.index.json": b"{}"}
    fetched("hf://org/open@v1")
    (tmp_path / "model" / "notes.json").write_bytes(b"the user's")
    hub.files["model.safetensors"] = weights
    del hub.files["model-00001-of-00001.safetensors"], hub.files["model.safetensors.index.json"]
    assert sorted(fetched("hf://org/open@main")) == sorted([*WANTED, "notes.json"])


def test_a_copy_deletes_only_what_a_fetch_has_put_there(
    hub: ModelHub, fetched: Fetched, tmp_path: Path, folder: Path
) -> None:
    hub.files["generation_config.json"] = b"{}"
    fetched("hf://org/open")
    (tmp_path / "model" / "notes.json").write_bytes(b"the user's")
    marker = tmp_path / "model" / ".complete"
    marker.write_text(marker.read_text().replace('"files": {', '"files": {"../notes.json": 1, '))
    (tmp_path / "notes.json").write_bytes(b"outside")
    assert sorted(fetched(f"file://{folder}")) == sorted([*WANTED, "notes.json"])
    (folder / "chat_template.jinja").unlink()
    assert "chat_template.jinja" not in fetched(f"file://{folder}")
    assert (tmp_path / "notes.json").exists()
    assert fetched("hf://org/open")["model.safetensors"] == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("hf://org/gated", r"org/gated is gated or private and the token \(HF_TOKEN\) is missing: accept the model's"),
        ("hf://org/absent", r"org/absent does not exist on http://.*, or the token \(HF_TOKEN\) gives no access"),
        ("hf://org/open@v9", "org/open has no revision v9"),
        ("s3://models/llms/absent", "s3://models/llms/absent holds nothing"),
        ("s3://elsewhere/llms", "there is no bucket elsewhere"),
    ],
)
def test_an_error_of_the_source_states_what_to_do(
    hub: ModelHub, store: ObjectStore, fetched: Fetched, uri: str, words: str
) -> None:
    with pytest.raises(FetchError, match=words):
        fetched(uri)


def test_an_error_names_the_secret_of_a_wrong_token_and_not_the_token(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVICE_SECRET", "hub-access")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    command = [LLMSERVICE, "fetch", "hf://org/gated", tmp_path / "model"]
    done = subprocess.run(command, check=False, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("llmservice fetch: org/gated is gated or private and the token (key token of Secret")
    assert "hub-access" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "hf_wrong" not in done.stderr + done.stdout


@pytest.mark.parametrize("token", ["hf_sécret", "hf_\nsecret"])
def test_a_token_that_no_header_can_have_is_refused(
    hub: ModelHub, fetched: Fetched, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(FetchError, match=r"^HF_TOKEN has characters that are not printable ASCII") as refused:
        fetched("hf://org/gated")
    assert token not in str(refused.value)
    assert hub.seen == []


@pytest.mark.usefixtures("hub")
def test_the_hubs_offline_mode_is_reported_at_once(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # read at the import
    with pytest.raises(FetchError, match=r"^HF_HUB_OFFLINE is set, and no request is sent to http://.*: unset it$"):
        fetched("hf://org/open")


def test_an_unreachable_hub_is_reported(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard service, which does not run
    with pytest.raises(FetchError, match=r"127.0.0.1:9 cannot be reached .* \(3 attempts\): check network and proxy"):
        fetched("hf://org/open")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for name in (*WANTED, "pytorch_model.bin", "README.md"):
        (source / name).write_bytes(b"{}")
    return source


def test_a_folder_is_copied_once_without_pickles(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    assert fetch(f"file://{folder}", target) == WANTED
    before = {path: path.stat().st_ino for path in target.iterdir() if path.name in WANTED}
    (folder / "config.json").write_bytes(b'{"changed": true}')
    assert fetch(f"file://{folder}", target) == WANTED
    changed = [path.name for path, inode in before.items() if path.stat().st_ino != inode]
    assert changed == ["config.json"]
    assert (target / "config.json").read_bytes() == b'{"changed": true}'
    marked = (target / ".complete").stat().st_ino
    assert fetch(f"file://{folder}", target) == WANTED
    assert (target / ".complete").stat().st_ino == marked


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "pickled weights .* are never loaded"),
        ("tokenizer.json", "holds no tokenizer.json"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(folder: Path, tmp_path: Path, missing: str, words: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(FetchError, match=words):
        fetch(f"file://{folder}", tmp_path / "model")


def test_a_model_of_sentence_transformers_without_a_transformer_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(folder / "modules.json")
    with pytest.raises(FetchError, match=r"holds no config.json: by its modules.json it is a model"):
        fetch(f"file://{folder}", tmp_path / "model")


def test_mistral_s_tokenizer_file_is_enough(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    assert "tekken.json" in fetch(f"file://{folder}", tmp_path / "model")


def test_a_repository_without_all_shards_is_refused_before_the_download(hub: ModelHub, fetched: Fetched) -> None:
    del hub.files["model.safetensors"]
    hub.files |= {f"model-0000{shard}-of-00003.safetensors": b"weights" for shard in (1, 3)}
    with pytest.raises(FetchError, match="incomplete: 2 of 3 shards"):
        fetched("hf://org/open")
    assert set(hub.sent) <= {""}


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("meta-llama/Llama-3", "no URI that can be fetched"),
        ("ftp://host/model", "no URI that can be fetched"),
        ("file://relative/path", "is not absolute"),
        ("file:///nowhere/at/all", "is no folder"),
        ("hf://", "names no repository"),
        ("hf://a/b/c", "names no repository"),
        ("hf://a/b@", "names no repository"),
        ("hf://../etc", "no repository"),
        ("s3://", "names no bucket"),
        ("s3://UPPER/model", "names no bucket"),
        ("s3://bucket/a\nb", "names no bucket"),
    ],
)
def test_an_invalid_uri_is_refused(tmp_path: Path, uri: str, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        fetch(uri, tmp_path / "model")


def test_a_target_that_cannot_be_written_is_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file, not a folder")
    with pytest.raises(FetchError, match=r"cannot fetch file://.* into .*model"):
        fetch(f"file://{folder}", tmp_path / "model")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "model.bin", "weights.pth", "README.md"], ["model.safetensors"]),
        (["consolidated.safetensors", "model-00001-of-00001.safetensors"], ["model-00001-of-00001.safetensors"]),
        (["consolidated.safetensors", "model.safetensors", "other.safetensors"], ["model.safetensors"]),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
        (["original/model.safetensors", "../up.json", "..\\up.json", ".hidden.json", "a\n.json", ""], []),
        (["tokenizer.json", "chat_template.jinja"], ["chat_template.jinja", "tokenizer.json"]),
        (["additional_chat_templates/tool_use.jinja", "b/rag.jinja"], ["additional_chat_templates/tool_use.jinja"]),
        (["2_Pooling/config.json", "10_Dense/config.json"], ["10_Dense/config.json", "2_Pooling/config.json"]),
        (["modules.json", "3_Other/config.json", "1_Pooling/config.json"], ["1_Pooling/config.json", "modules.json"]),
        (["2_Dense/config.json", "2_Dense/model.safetensors"], ["2_Dense/config.json", "2_Dense/model.safetensors"]),
    ],
)
def test_only_files_that_serving_needs_are_fetched(names: list[str], expected: list[str]) -> None:
    assert needed(names) == expected


def test_the_pooling_of_an_encoder_is_fetched_into_its_folder(hub: ModelHub, tmp_path: Path, folder: Path) -> None:
    hub.files["1_Pooling/config.json"] = b'{"pooling_mode_cls_token": true}'
    assert "1_Pooling/config.json" in fetch("hf://org/open", tmp_path / "fetched")
    assert (tmp_path / "fetched/1_Pooling/config.json").read_bytes() == hub.files["1_Pooling/config.json"]
    assert "1_Pooling/config.json" in fetch(f"file://{tmp_path / 'fetched'}", tmp_path / "copied")
    assert not list((tmp_path / "copied").glob("**/*.part"))


def test_an_adapter_is_fetched_from_a_hub(hub: ModelHub, tmp_path: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    hub.files |= dict.fromkeys(names, b"{}")
    assert fetch("hf://org/open@v1", tmp_path, FetchOptions(adapter=True)) == names
    assert all((tmp_path / name).read_bytes() == b"{}" for name in names)
    assert not (tmp_path / "config.json").exists()
    fetch("hf://org/open@main", tmp_path)
    fetch("hf://org/open@v1", tmp_path, FetchOptions(adapter=True))
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} >= {*names, *WANTED}


def test_an_adapter_is_fetched_without_other_files(tmp_path: Path) -> None:
    source, options = tmp_path / "source", FetchOptions(adapter=True)
    source.mkdir()
    for name in ("adapter_config.json", "adapter_model.bin", "tokenizer.json"):
        (source / name).write_bytes(b"{}")
    with pytest.raises(FetchError, match=r"holds no adapter_model\.safetensors: .*pickle"):
        fetch(f"file://{source}", tmp_path / "copy", options)
    (source / "adapter_model.safetensors").write_bytes(b"")
    assert fetch(f"file://{source}", tmp_path / "copy", options) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (tmp_path / "copy" / "tokenizer.json").exists()
