"""The part of the Hugging Face hub's API that downloads use, on the loopback."""

from __future__ import annotations

import hashlib
import json
import re

from harness.stores.file_server import FileServer, Request, Response

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
"""Its config.json."""
_JSON = {"Content-Type": "application/json"}


class ModelHub(FileServer):
    """`org/open` at main and v1, and `org/gated`, which needs `token`. Nothing else exists."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.files = dict(files)
        self.token = "hf_secret"

    def find(self, request: Request) -> Response:
        match = re.fullmatch(
            r"/(?:api/models/)?org/(?P<name>open|gated)/(?P<what>revision|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?",
            request.path,
        )
        if match is None:
            return Response(401 if request.path.startswith("/api/") else 404, headers={"X-Error-Code": "RepoNotFound"})
        if match["name"] == "gated" and request.authorization != f"Bearer {self.token}":
            return Response(403, headers={"X-Error-Code": "GatedRepo"})
        if match["revision"] not in {"main", "v1", COMMIT}:
            return Response(404, headers={"X-Error-Code": "RevisionNotFound"})
        if match["what"] == "revision":
            return Response(content=json.dumps(self._listing(f"org/{match['name']}")).encode(), headers=_JSON)
        if match["file"] not in self.files:
            return Response(404, headers={"X-Error-Code": "EntryNotFound"})
        return Response(content=self.files[match["file"]], file=match["file"], headers={"X-Repo-Commit": COMMIT})

    def _listing(self, name: str) -> dict[str, object]:
        return {"id": name, "sha": COMMIT, "siblings": [self._sibling(file) for file in self.files]}

    def _sibling(self, name: str) -> dict[str, object]:
        content = self.files[name]
        git = hashlib.sha1(b"blob %d\0" % len(content) + content)  # noqa: S324 - git's
        sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git.hexdigest()}
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        return sibling
