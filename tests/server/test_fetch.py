"""Checkpoints from a folder and from a hub: the real client against a small hub on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from llmservice_server.fetch import FetchError, fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLMSERVICE = Path(sys.executable).with_name("llmservice")
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"words",
    "original/consolidated.safetensors": b"other weights",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


class Hub(BaseHTTPRequestHandler):
    """One repository, org/open at main and v1, and org/gated, whose licence nobody has accepted."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.server.seen.append((unquote(urlsplit(self.path).path), self.headers.get("authorization")))  # type: ignore[attr-defined]
        status, headers, content = self._find(unquote(urlsplit(self.path).path))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _find(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/models/org/gated/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        for revision in ("main", "v1", COMMIT):
            if path == f"/api/models/org/open/revision/{revision}":
                siblings = [{"rfilename": name} for name in FILES]
                return 200, _JSON, json.dumps({"id": "org/open", "sha": COMMIT, "siblings": siblings}).encode()
            if path == f"/api/models/org/open/tree/{revision}":
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # noqa: S324
                    for name, content in FILES.items()
                ]
                return 200, _JSON, json.dumps(tree).encode()
        if path.startswith("/api/models/org/open/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path.startswith(resolve := f"/org/open/resolve/{COMMIT}/") and (name := path.removeprefix(resolve)) in FILES:
            etag = hashlib.sha1(FILES[name]).hexdigest()  # noqa: S324  # git's
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, FILES[name]
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        pass


_JSON = {"Content-Type": "application/json"}


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _fetch(hub: ThreadingHTTPServer, uri: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The real command: the hub's client reads its settings when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(directory.parent / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [LLMSERVICE, "fetch", uri, directory]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("uri", ["hf://org/open", "hf://org/open@v1"])
def test_a_repository_is_fetched_without_its_pickles(hub: ThreadingHTTPServer, tmp_path: Path, uri: str) -> None:
    done = _fetch(hub, uri, tmp_path / "model")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/model: {', '.join(WANTED)}\n")
    assert {name: (tmp_path / "model" / name).read_bytes() for name in WANTED} == {name: FILES[name] for name in WANTED}
    assert not list(tmp_path.rglob("*.bin"))
    paths = [path for path, _ in hub.seen]  # type: ignore[attr-defined]
    assert not any("pytorch_model.bin" in path or "original" in path for path in paths)
    assert ("main" if uri == "hf://org/open" else "v1") in " ".join(paths)
    assert (f"/org/open/resolve/{COMMIT}/config.json", "Bearer hf_secret") in hub.seen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("hf://org/gated", "org/gated is gated: accept its licence"),
        ("hf://org/absent", "org/absent does not exist on the hub, or HF_TOKEN gives no access"),
        ("hf://org/open@v9", "org/open has no revision v9"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(
    hub: ThreadingHTTPServer, tmp_path: Path, uri: str, words: str
) -> None:
    done = _fetch(hub, uri, tmp_path / "model")
    assert done.returncode == 1
    assert done.stderr.startswith(f"llmservice fetch: {words}")
    assert done.stderr.count("\n") == 1
    assert "hf_secret" not in done.stderr + done.stdout


def test_an_unreachable_hub_is_named_with_what_to_check(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    hub.server_port = 9  # discard: nobody listens
    done = _fetch(hub, "hf://org/open", tmp_path / "model")
    assert done.returncode == 1
    assert "the hub cannot be reached for org/open" in done.stderr
    assert "check network, proxy and HF_ENDPOINT" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    for name, content in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    return source


def test_a_folder_is_copied_without_its_pickles_and_only_once(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    assert fetch(f"file://{folder}", target) == WANTED
    before = {path: path.stat().st_ino for path in target.iterdir()}
    (folder / "config.json").write_bytes(b'{"changed": true}')
    assert fetch(f"file://{folder}", target) == WANTED
    changed = [path.name for path, inode in before.items() if path.stat().st_ino != inode]
    assert changed == ["config.json"]
    assert (target / "config.json").read_bytes() == b'{"changed": true}'


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "pickled weights .* are never loaded"),
        ("tokenizer.json", "holds no tokenizer.json"),
    ],
)
def test_a_folder_that_no_server_could_use_is_refused(folder: Path, tmp_path: Path, missing: str, words: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(FetchError, match=words):
        fetch(f"file://{folder}", tmp_path / "model")


def test_a_missing_shard_is_noticed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    for shard in (1, 3):
        (folder / f"model-0000{shard}-of-00003.safetensors").write_bytes(b"weights")
    with pytest.raises(FetchError, match="incomplete: 2 of 3 shards"):
        fetch(f"file://{folder}", tmp_path / "model")


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
    ],
)
def test_a_uri_that_means_nothing_is_refused(tmp_path: Path, uri: str, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        fetch(uri, tmp_path / "model")


def test_a_target_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file, not a folder")
    with pytest.raises(FetchError, match=r"cannot fetch file://.* into .*model"):
        fetch(f"file://{folder}", tmp_path / "model")
