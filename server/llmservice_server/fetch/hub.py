"""`hf://org/name[@revision]`: a repository of the Hugging Face hub, or of a mirror that HF_ENDPOINT names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2
from huggingface_hub import HfApi, errors, hf_hub_url
from huggingface_hub.hf_api import RepoSibling

from llmservice_server.fetch.error import FetchError, RetryableError
from llmservice_server.fetch.source import Digest, RemoteFile

_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_TIMEOUT_S = 20.0


@dataclass(slots=True)
class HubSource:
    """A repository at one revision. Every file is read at the commit that the revision meant when it was listed."""

    repository: str
    revision: str = "main"
    endpoint: str = "https://huggingface.co"
    token: str | None = None
    token_from: str = "HF_TOKEN"  # noqa: S105 - a name, no secret
    """What messages call the place that the token comes from, such as a Secret's name."""
    _commit: str = ""
    _files: dict[str, RepoSibling] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str) -> HubSource:
        """From what follows `hf://`, with HF_ENDPOINT, HF_TOKEN and LLMSERVICE_SECRET. Raises FetchError."""
        repository, separator, revision = name.partition("@")
        if not _NAME.fullmatch(repository) or ".." in repository or (separator and not revision):
            raise FetchError(f"hf://{name} names no repository, expected hf://org/name or hf://org/name@revision")
        secret = os.environ.get("LLMSERVICE_SECRET")
        return cls(
            repository,
            revision or "main",
            endpoint=(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
            token=os.environ.get("HF_TOKEN") or None,
            token_from=f"key token of Secret {secret}" if secret else "HF_TOKEN",
        )

    @property
    def where(self) -> str:
        return f"hf://{self.repository}@{self.revision}"

    def names(self) -> list[str]:
        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        with self._explained():
            info = api.model_info(self.repository, revision=self.revision, files_metadata=True, timeout=_TIMEOUT_S)
        self._commit = info.sha or self.revision
        self._files = {sibling.rfilename: sibling for sibling in info.siblings or []}
        return list(self._files)

    def describe(self, names: list[str]) -> list[RemoteFile]:
        return [self._remote_file(self._files[name]) for name in names]

    def headers(self, file: RemoteFile, extra: Mapping[str, str]) -> dict[str, str]:
        return {**extra, "Authorization": f"Bearer {self.token}"} if self.token else dict(extra)

    def refusal(self, status: int, name: str) -> FetchError:
        if status in {401, 403}:
            return self._gated()
        if status == 404:
            return FetchError(f"{self.where} has no file {name}: check repository and revision")
        return FetchError(f"{self.where}: {self.endpoint} answers {status} for {name}: check HF_ENDPOINT and the proxy")

    def _remote_file(self, sibling: RepoSibling) -> RemoteFile:
        name, size = sibling.rfilename, sibling.size
        if size is None:
            raise FetchError(f"{self.endpoint} tells no size of {name}: use a hub or mirror with the whole of its API")
        digest = None
        if sibling.lfs is not None:
            digest = Digest("sha256", sibling.lfs.sha256)
        elif sibling.blob_id:
            digest = Digest("git-sha1", sibling.blob_id)
        url = hf_hub_url(self.repository, name, revision=self._commit, endpoint=self.endpoint)
        return RemoteFile(name, size, url, digest.value if digest else self._commit, digest)

    def _gated(self) -> FetchError:
        given = "is refused" if self.token else "is missing"
        return FetchError(
            f"{self.repository} is gated or private and the token ({self.token_from}) {given}: accept the model's"
            " licence on the hub and put a token of that account into the Secret that spec.model.secretRef names"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The hub's errors, each with what to do about it."""
        try:
            yield
        except errors.GatedRepoError as error:
            raise self._gated() from error
        except errors.RepositoryNotFoundError as error:  # it answers 401 for what it does not show
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
            if status in {408, 425, 429} or status >= 500:
                raise RetryableError(f"{self.endpoint} answers {status}") from error
            raise self.refusal(status, "the list of files") from error
        except (httpx2.TransportError, errors.OfflineModeIsEnabled) as error:
            raise RetryableError(f"{self.endpoint} cannot be reached ({type(error).__name__})") from error
