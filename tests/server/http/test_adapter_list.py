"""Following a list of adapters, with a fetch command of the test's and the adapters of an engine without a device."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

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
        engine: Any = Engine()
        self.engine: Engine = engine
        self.state = ServerState(config=config, engine=engine, metrics=Metrics("llmservice_", "tiny"))
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

    def children(self) -> set[str]:
        """Of `FETCH`, those that have begun and whose folders are there."""
        return {path.read_text().strip() for path in self.copies.glob("*/pid")}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)


def _is_running(child: str) -> bool:
    return Path("/proc", child).exists()


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
        assert found.engine.adapters.keys() == {"poet", "bard"}  # whichever was fetched first


async def test_a_listed_adapter_that_a_client_replaces_is_loaded_again(tmp_path: Path) -> None:
    async with followed(tmp_path, poet="a") as found:
        await found.until(lambda: "poet" in found.engine.adapters)
        listed = found.engine.adapters["poet"]
        await found.engine.load_adapter("poet", "/another")
        await found.until(lambda: found.engine.adapters["poet"] == listed)


FETCH = """
mkdir -p $2; echo $$ >$2/pid.new; mv $2/pid.new $2/pid
case $1 in slow*) exec sleep 1000;; lost) echo "the connection is lost" >&2; exit 1;; esac
"""


async def test_a_slow_source_holds_up_no_other_adapter(tmp_path: Path) -> None:
    async with followed(tmp_path, FETCH, slow="slow", lost="lost", poet="a") as found:
        await found.until(lambda: "poet" in found.engine.adapters and bool(found.state.adapter_failures))
        assert found.state.adapter_failures == {("lost", "lost"): "the connection is lost"}
        assert found.state.adapters_pending
        found.write(slow="slow", bard="b")
        await found.until(lambda: list(found.engine.adapters) == ["bard"])


async def test_what_is_not_listed_any_more_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    async with followed(tmp_path, FETCH, slow="slow", lost="lost", poet="a", bard="b") as found:
        await found.until(lambda: len(found.engine.adapters) == 2 and len(found.children()) == 4)
        children = found.children()
        found.write(bard="b")
        await found.until(lambda: not found.state.adapters_pending and len(found.children()) == 1)
        assert list(found.engine.adapters) == ["bard"]
        assert len(list(found.copies.iterdir())) == 1
        assert not any(map(_is_running, children))


async def test_four_adapters_are_fetched_at_once(tmp_path: Path) -> None:
    uris = {f"a{number}": f"slow{number}" for number in range(5)}
    async with followed(tmp_path, FETCH, **uris) as found:
        await found.until(lambda: len(found.children()) == 4)
        first = found.children()
        del uris["a1"]
        found.write(**uris)
        await found.until(lambda: (len(found.children() & first), len(found.children() - first)) == (3, 1))


async def test_a_full_disk_fails_an_adapter_and_the_list_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    async with followed(tmp_path, FETCH, poet="a") as found:
        await found.until(lambda: bool(found.state.adapter_failures))
        assert "cannot be started" in found.state.adapter_failures["poet", "a"]
        monkeypatch.setattr(tempfile, "tempdir", None)
        found.write(bard="b")
        await found.until(lambda: list(found.engine.adapters) == ["bard"])
