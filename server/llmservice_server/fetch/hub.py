"""`hf://org/name[@revision]`: a repository of the Hugging Face hub, or of the mirror that HF_ENDPOINT names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx2
from huggingface_hub import HfApi, errors, hf_hub_url
from huggingface_hub.hf_api import RepoSibling

from llmservice_server.fetch.source import (
    CorruptError,
    Digest,
    FetchError,
    RemoteFile,
    RetryableError,
    first_byte,
    header_value,
    is_transient,
)

_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_CONNECT_TIMEOUT_S = 10.0
_LIST_TIMEOUT_S = 20.0


@dataclass(slots=True)
class HubSource:
    """A repository at one revision. Every file is read at the commit that the revision had when it was listed."""

    repository: str
    revision: str
    endpoint: str
    token: str | None
    token_from: str
    """Where the token comes from, for messages: an environment variable, or a Secret's key."""
    silence_s: float
    _commit: str = ""
    _files: dict[str, RepoSibling] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, silence_s: float) -> HubSource:
        """From what follows `hf://`, HF_ENDPOINT, HF_TOKEN and LLMSERVICE_SECRET. Raises FetchError."""
        repository, separator, revision = name.partition("@")
        if not _NAME.fullmatch(repository) or ".." in repository or (separator and not revision):
            raise FetchError(f"hf://{name} names no repository, expected hf://org/name or hf://org/name@revision")
        secret = os.environ.get("LLMSERVICE_SECRET")
        token_from = f"key token of Secret {secret}" if secret else "HF_TOKEN"
        return cls(
            repository,
            revision or "main",
            endpoint=(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
            token=header_value(os.environ.get("HF_TOKEN", ""), token_from) or None,
            token_from=token_from,
            silence_s=silence_s,
        )

    @property
    def where(self) -> str:
        return f"hf://{self.repository}@{self.revision}"

    def names(self) -> list[str]:
        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        with self._explained():
            info = api.model_info(self.repository, revision=self.revision, files_metadata=True, timeout=_LIST_TIMEOUT_S)
        self._commit = info.sha or self.revision
        self._files = {sibling.rfilename: sibling for sibling in info.siblings or []}
        return list(self._files)

    def describe(self, names: list[str]) -> list[RemoteFile]:
        return [self._remote_file(self._files[name]) for name in names]

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        url = hf_hub_url(self.repository, file.name, revision=self._commit, endpoint=self.endpoint)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        timeout = httpx2.Timeout(self.silence_s, connect=_CONNECT_TIMEOUT_S)
        try:
            with httpx2.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
                self._check(response, file.name)
                yield first_byte(response.headers.get("content-range"), start), response.iter_bytes()
        except httpx2.RequestError as error:
            raise RetryableError(f"the connection broke ({type(error).__name__})") from error

    def _check(self, response: httpx2.Response, name: str) -> None:
        status = response.status_code
        if status in {200, 206}:
            return
        if is_transient(status):
            raise RetryableError(f"HTTP {status}", _retry_after_s(response))
        if status == 416:
            raise CorruptError("the requested range is beyond its end")
        if status == 404:
            raise FetchError(f"{self.where} has no file {name}: check repository and revision")
        raise self._refusal(status, name)

    def _remote_file(self, sibling: RepoSibling) -> RemoteFile:
        name, size = sibling.rfilename, sibling.size
        if size is None:
            raise FetchError(f"{self.endpoint} states no size of {name}: use a hub or mirror with the complete API")
        digest = None
        if sibling.lfs is not None:
            digest = Digest("sha256", sibling.lfs.sha256)
        elif sibling.blob_id:
            digest = Digest("git-sha1", sibling.blob_id)
        return RemoteFile(name, size, digest.value if digest else self._commit, digest)

    def _refusal(self, status: int, name: str) -> FetchError:
        if status in {401, 403}:
            return self._gated()
        return FetchError(f"{self.where}: {self.endpoint} returns {status} for {name}: check HF_ENDPOINT and the proxy")

    def _gated(self) -> FetchError:
        given = "is refused" if self.token else "is missing"
        return FetchError(
            f"{self.repository} is gated or private and the token ({self.token_from}) {given}: accept the model's"
            " licence on the hub and put a token of that account into the Secret that spec.model.secretRef names"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the hub client's errors to ours, which state what to do."""
        try:
            yield
        except errors.GatedRepoError as error:
            raise self._gated() from error
        except errors.RepositoryNotFoundError as error:  # a 401 means this as well
            raise FetchError(
                f"{self.repository} does not exist on {self.endpoint}, or the token ({self.token_from}) gives no"
                " access to it: check the name and the token"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise FetchError(
                f"{self.repository} has no revision {self.revision}: check the branch, tag or commit"
            ) from error
        except errors.HFValidationError as error:
            raise FetchError(f"{self.repository} is no repository's name: {error}") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if is_transient(status):
                raise RetryableError(f"{self.endpoint} returns {status}", _retry_after_s(error.response)) from error
            raise self._refusal(status, "the list of files") from error
        except errors.OfflineModeIsEnabled as error:
            name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
            raise FetchError(f"{name} is set, and no request is sent to {self.endpoint}: unset it") from error
        except httpx2.TransportError as error:
            raise RetryableError(f"{self.endpoint} cannot be reached ({type(error).__name__})") from error


def _retry_after_s(response: httpx2.Response) -> float | None:
    """Seconds only: a date would depend on this machine's clock."""
    with suppress(ValueError):
        return max(0.0, float(response.headers.get("retry-after", "")))
    return None
