"""Follows a file that lists LoRA adapters, as a ConfigMap mounts it: fetches, loads and unloads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec

from llmservice_server.http.state import ServerState
from llmservice_server.ipc.client import EngineDeadError

log = logging.getLogger("llmservice.server")

FETCH_COMMAND = (sys.executable, "-P", "-m", "llmservice_planner", "fetch", "--adapter")
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"

_PERIOD_S = 5.0
_RETRY_S = 60.0  # after a failure; a changed entry is tried at once
_LONGEST_START_S = 60.0  # so long the adapters of the first comparison keep a server unready


class ListedAdapter(msgspec.Struct, frozen=True):
    """An entry of the file."""

    name: Annotated[str, msgspec.Meta(pattern=ADAPTER_NAME, max_length=128)]
    uri: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    pinned: bool = False


def parse_list(text: bytes) -> list[ListedAdapter]:
    """Raises ValueError."""
    listed = msgspec.json.decode(text, type=list[ListedAdapter])  # its errors are ValueErrors
    if len({each.name for each in listed}) < len(listed):
        raise ValueError("a name is listed twice: give each adapter its own")
    return listed


class _FetchError(Exception):
    """The last line that the child process wrote."""


class AdapterList:
    """Keeps the engine's adapters as `file` lists them; each is fetched into a folder of its own below `folder`."""

    def __init__(
        self,
        state: ServerState,
        file: Path,
        folder: Path,
        fetch_command: Sequence[str] = FETCH_COMMAND,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._state, self._file, self._folder, self._fetch_command = state, file, folder, fetch_command
        self._period_s = period_s
        self._loaded: dict[str, ListedAdapter] = {}
        self._retries: dict[ListedAdapter, float] = {}  # those that failed, and when they are tried again (monotonic)
        self._problem: str | None = None  # of the file
        state.adapters_pending = True

    @classmethod
    def of(cls, state: ServerState) -> AdapterList | None:
        config = state.config
        if config.adapters_file is None or config.adapters_dir is None:
            return None
        return cls(state, config.adapters_file, config.adapters_dir)

    async def run(self) -> None:
        """Compare every 5 s, until cancelled or the engine has died."""
        asyncio.get_running_loop().call_later(_LONGEST_START_S, self._not_pending)
        with contextlib.suppress(EngineDeadError):
            while True:
                if (listed := self._read()) is not None:
                    await self._compare(listed)
                self._not_pending()
                await asyncio.sleep(self._period_s)

    def _not_pending(self) -> None:
        self._state.adapters_pending = False

    def _read(self) -> list[ListedAdapter] | None:
        """None where the file is no such list, which is logged once; a missing one lists nothing."""
        try:
            listed = parse_list(self._file.read_bytes())
        except FileNotFoundError:
            listed = []
        except (OSError, ValueError) as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("the list of adapters cannot be read", extra={"fields": {"error": self._problem}})
            return None
        self._problem = None
        return listed

    async def _compare(self, listed: Sequence[ListedAdapter]) -> None:
        """Unload what is not listed, and load what is not loaded as listed. Raises EngineDeadError."""
        names, keys = {each.name for each in listed}, {(each.name, each.uri) for each in listed}
        for name in [name for name in self._loaded if name not in names]:
            await self._unload(self._loaded.pop(name))
        failures = self._state.adapter_failures
        for key in failures.keys() - keys:
            del failures[key]
        self._retries = {each: retry_s for each, retry_s in self._retries.items() if each in listed}
        for each in listed:
            key = each.name, each.uri
            if self._loaded.get(each.name) == each and each.name in self._state.engine.adapters:
                failures.pop(key, None)  # of an entry that was other than this one meanwhile
                continue
            if time.monotonic() < self._retries.get(each, 0.0):
                continue
            if (error := await self._load(each)) is None:
                failures.pop(key, None)
                continue
            if failures.get(key) != error:
                log.error("an adapter cannot be loaded", extra={"fields": {"adapter": each.name, "error": error}})
            failures[key], self._retries[each] = error, time.monotonic() + _RETRY_S
        self._state.report_adapters()

    async def _load(self, adapter: ListedAdapter) -> str | None:
        """Returns why it cannot be loaded."""
        if (problem := self._state.why_not_an_adapter(adapter.name)) is not None:
            return problem
        before, folder = self._loaded.get(adapter.name), self._folder_of(adapter)
        began_s = time.monotonic()
        try:
            await self._fetch(adapter.uri, folder)
        except _FetchError as error:
            return str(error)
        report = await self._state.engine.load_adapter(adapter.name, str(folder), pinned=adapter.pinned)
        if report.error is not None:
            if before is None or self._folder_of(before) != folder:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # its source may be corrected
            return report.error
        self._loaded[adapter.name] = adapter
        self._state.adapter_uris[adapter.name] = adapter.uri
        if before is not None and self._folder_of(before) != folder:
            await asyncio.to_thread(shutil.rmtree, self._folder_of(before), ignore_errors=True)
        seconds = round(time.monotonic() - began_s, 3)
        version = self._state.engine.adapters[adapter.name].version
        log.info(
            "an adapter is loaded", extra={"fields": {"adapter": adapter.name, "version": version, "seconds": seconds}}
        )
        return None

    async def _unload(self, adapter: ListedAdapter) -> None:
        await self._state.engine.unload_adapter(adapter.name)
        self._state.adapter_uris.pop(adapter.name, None)
        await asyncio.to_thread(shutil.rmtree, self._folder_of(adapter), ignore_errors=True)
        log.info("an adapter is unloaded", extra={"fields": {"adapter": adapter.name}})

    def _folder_of(self, adapter: ListedAdapter) -> Path:
        return self._folder / blake2b(f"{adapter.name} {adapter.uri}".encode(), digest_size=8).hexdigest()

    async def _fetch(self, uri: str, folder: Path) -> None:
        """In a child process, which needs no memory of this one afterwards. Raises _FetchError."""
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            child = await asyncio.create_subprocess_exec(
                *self._fetch_command, uri, str(folder), stdout=nowhere, stderr=pipe
            )
        except OSError as error:
            raise _FetchError(f"llmservice fetch cannot be started: {error}") from error
        try:
            _, written = await child.communicate()
        except asyncio.CancelledError:
            child.terminate()
            raise
        if child.returncode:
            lines = written.decode(errors="replace").strip().splitlines()
            said = lines[-1].removeprefix("llmservice fetch: ") if lines else ""
            raise _FetchError(said or f"llmservice fetch ended with exit status {child.returncode}")
