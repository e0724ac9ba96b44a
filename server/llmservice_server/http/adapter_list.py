"""Follows a file that lists LoRA adapters, as a ConfigMap mounts it: fetches, loads and unloads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence, Set
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
_MOST_FETCHES = 4  # at once
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
        self._listed: Sequence[ListedAdapter] = ()
        self._loaded: dict[str, ListedAdapter] = {}
        self._fetches: dict[Path, asyncio.Task[str | None]] = {}  # by folder; they return why it cannot be fetched
        self._fetching = asyncio.Semaphore(_MOST_FETCHES)
        self._folders: set[Path] = set()  # that were begun, and are not removed
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
        """Compare every 5 s and after each fetch, until cancelled or the engine has died."""
        asyncio.get_running_loop().call_later(_LONGEST_START_S, self._not_pending)
        try:
            with contextlib.suppress(EngineDeadError):
                while True:
                    self._read()
                    await self._compare()
                    if self._fetches:
                        fetches = self._fetches.values()
                        await asyncio.wait(fetches, timeout=self._period_s, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        self._not_pending()
                        await asyncio.sleep(self._period_s)
        finally:
            for fetch in self._fetches.values():
                fetch.cancel()
            await asyncio.gather(*self._fetches.values(), return_exceptions=True)

    def _not_pending(self) -> None:
        self._state.adapters_pending = False

    def _read(self) -> None:
        """A file that is no such list is logged once, and changes nothing; a missing one lists nothing."""
        try:
            self._listed = parse_list(self._file.read_bytes())
        except FileNotFoundError:
            self._listed = ()
        except (OSError, ValueError) as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("the list of adapters cannot be read", extra={"fields": {"error": self._problem}})
            return
        self._problem = None

    async def _compare(self) -> None:
        """Unload what is not listed, load what is fetched, and begin to fetch the rest. Raises EngineDeadError."""
        names, keys = {each.name for each in self._listed}, {(each.name, each.uri) for each in self._listed}
        for name in [name for name in self._loaded if name not in names]:
            await self._unload(self._loaded.pop(name))
        failures = self._state.adapter_failures
        for key in failures.keys() - keys:
            del failures[key]
        self._retries = {each: retry_s for each, retry_s in self._retries.items() if each in self._listed}
        folders = {self._folder_of(each) for each in self._listed}
        for folder in self._fetches.keys() - folders:
            if (fetch := self._fetches[folder]).done():
                del self._fetches[folder]
            elif not fetch.cancelling():  # once, so that its process has ended when it is done
                fetch.cancel()
        for each in self._listed:
            folder = self._folder_of(each)
            begun = self._fetches.get(folder)
            if begun is not None and not begun.done():
                continue
            self._fetches.pop(folder, None)
            held = self._state.engine.adapters.get(each.name)  # a client may have replaced or unloaded it
            if self._loaded.get(each.name) == each and held is not None and held.folder == str(folder):
                failures.pop((each.name, each.uri), None)  # of an entry that was other than this one meanwhile
            elif begun is not None and not begun.cancelled():
                self._note(each, begun.result() or await self._load(each))
            elif time.monotonic() >= self._retries.get(each, 0.0):
                if (problem := self._state.why_not_an_adapter(each.name)) is not None:
                    self._note(each, problem)
                    continue
                self._folders.add(folder)
                self._fetches[folder] = asyncio.create_task(self._fetch(each.uri, folder))
        in_use = folders | self._fetches.keys() | {self._folder_of(each) for each in self._loaded.values()}
        await self._remove(self._folders - in_use)
        self._state.report_adapters()

    def _note(self, adapter: ListedAdapter, error: str | None) -> None:
        """Whether it is loaded, or why not."""
        failures, key = self._state.adapter_failures, (adapter.name, adapter.uri)
        if error is None:
            failures.pop(key, None)
            return
        if failures.get(key) != error:
            log.error("an adapter cannot be loaded", extra={"fields": {"adapter": adapter.name, "error": error}})
        failures[key], self._retries[adapter] = error, time.monotonic() + _RETRY_S

    async def _load(self, adapter: ListedAdapter) -> str | None:
        """Returns why it cannot be loaded."""
        before, folder = self._loaded.get(adapter.name), self._folder_of(adapter)
        report = await self._state.engine.load_adapter(adapter.name, str(folder), pinned=adapter.pinned)
        if report.error is not None:
            if before is None or self._folder_of(before) != folder:
                await self._remove({folder})  # its source may be corrected
            return report.error
        self._loaded[adapter.name] = adapter
        self._state.adapter_uris[adapter.name] = adapter.uri
        version = self._state.engine.adapters[adapter.name].version
        log.info("an adapter is loaded", extra={"fields": {"adapter": adapter.name, "version": version}})
        return None

    async def _unload(self, adapter: ListedAdapter) -> None:
        await self._state.engine.unload_adapter(adapter.name)
        self._state.adapter_uris.pop(adapter.name, None)
        log.info("an adapter is unloaded", extra={"fields": {"adapter": adapter.name}})

    async def _remove(self, folders: Set[Path]) -> None:
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._folders -= folders

    def _folder_of(self, adapter: ListedAdapter) -> Path:
        return self._folder / blake2b(f"{adapter.name} {adapter.uri}".encode(), digest_size=8).hexdigest()

    async def _fetch(self, uri: str, folder: Path) -> str | None:
        """In a child process, which needs no memory of this one afterwards. Returns why it cannot be fetched.

        Its output is no pipe, with which asyncio may wait for ever where a start is cancelled.
        """
        async with self._fetching:
            began_s = time.monotonic()
            try:
                status, lines = await self._run_fetch(uri, folder)
            except OSError as error:  # no memory for a process, or no space for its output
                return f"llmservice fetch cannot be started: {error}"
        if status:
            said = lines[-1].removeprefix("llmservice fetch: ") if lines else ""
            return said or f"llmservice fetch ended with exit status {status}"
        seconds = round(time.monotonic() - began_s, 3)
        log.info("an adapter is fetched", extra={"fields": {"uri": uri, "seconds": seconds}})
        return None

    async def _run_fetch(self, uri: str, folder: Path) -> tuple[int, list[str]]:
        """The exit status of the child process, and the lines that it wrote."""
        with tempfile.TemporaryFile() as output:
            child = await asyncio.create_subprocess_exec(
                *self._fetch_command, uri, str(folder), stdout=asyncio.subprocess.DEVNULL, stderr=output
            )
            try:
                status = await child.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
                await child.wait()  # it writes to the folder until then
                raise
            output.seek(0)
            return status, output.read().decode(errors="replace").strip().splitlines()
