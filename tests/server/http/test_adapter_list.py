"""Following a list of adapters, with a fetch command of the test's and the adapters of an engine without a device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from llmservice_server.engine.adapters import Adapters
from llmservice_server.http.adapter_list import AdapterList
from llmservice_server.http.state import ServeConfig, ServerState
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.types.messages import AdapterInfo, AdapterReport, LoadAdapter, UnloadAdapter


class Weights(NamedTuple):
    version: str


class Store:
    """Implements `AdapterStore`."""

    num_slots = 1

    def read(self, folder: str) -> Future[Weights]:
        future = Future[Weights]()
        future.set_result(Weights(folder))
        return future

    def put(self, slot: int, weights: Weights) -> None:
        pass


class Engine:
    """The part of `EngineClient` that concerns adapters."""

    def __init__(self) -> None:
        self._adapters = Adapters(Store())
        self.adapters: dict[str, AdapterInfo] = {}

    async def load_adapter(self, name: str, folder: str, *, pinned: bool = False) -> AdapterReport:
        return self._change(LoadAdapter(request_id="load", name=name, folder=folder, pinned=pinned))

    async def unload_adapter(self, name: str) -> AdapterReport:
        return self._change(UnloadAdapter(request_id="unload", name=name))

    def _change(self, message: LoadAdapter | UnloadAdapter) -> AdapterReport:
        self._adapters.change(message)
        self._adapters.take_ready(idle=False)
        report = self._adapters.take_reports()[-1]
        self.adapters = {each.name: each for each in report.adapters}
        return report


class Followed:
    def __init__(self, folder: Path, fetch: str) -> None:
        """fetch: a shell script, with the URI as $1 and the folder as $2."""
        config = ServeConfig(
            served_model_names=("tiny",), queue_bounds={}, request_timeout_s=None, queue_timeout_s=None
        )
        self.engine: Any = Engine()
        self.state = ServerState(config=config, engine=self.engine, metrics=Metrics("llmservice_", "tiny"))
        self.copies = folder / "copies"
        self._file = folder / "adapters.json"
        command = ("sh", "-c", fetch, "fetch")
        self.list = AdapterList(self.state, self._file, self.copies, command, period_s=0.001)

    def write(self, **uris: str) -> None:
        """Pinned where the URI ends with an exclamation mark."""
        entries = [{"name": name, "uri": uri.rstrip("!"), "pinned": uri.endswith("!")} for name, uri in uris.items()]
        unfinished = self._file.with_suffix(".new")
        unfinished.write_text(json.dumps(entries))
        unfinished.replace(self._file)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)


@asynccontextmanager
async def followed(folder: Path, fetch: str = "true", **uris: str) -> AsyncIterator[Followed]:
    found = Followed(folder, fetch)
    found.write(**uris)
    following = asyncio.create_task(found.list.run())
    yield found
    following.cancel()
    await asyncio.wait([following])


async def test_the_failure_of_an_entry_is_forgotten_when_it_is_listed_as_it_is_loaded(tmp_path: Path) -> None:
    async with followed(tmp_path, poet="a", bard="b") as found:
        await found.until(lambda: len(found.engine.adapters) == 2)
        found.write(poet="a!", bard="b")
        await found.until(lambda: bool(found.state.adapter_failures))
        found.write(poet="a", bard="b")
        await found.until(lambda: not found.state.adapter_failures)
        assert list(found.engine.adapters) == ["poet", "bard"]
