"""The demo: from a manifest to tokens, to several replicas and back to one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from rich.console import Console

from llmservice_bench.client import Target, measure_word_rate
from llmservice_bench.drive import Load, Progress, drive, open_session
from llmservice_bench.record import RequestRecord
from llmservice_local.demo.observation import Observation, Observer
from llmservice_local.demo.service import apply, chat, read_manifest, wait_ready
from llmservice_local.demo.summary import NEEDED_FINAL, Outcome, summarise
from llmservice_local.demo.traffic import calibrate, trace_lengths
from llmservice_local.demo.up import UpProcess, run_command
from llmservice_local.demo.view import LiveTable
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_planner.command import CommandError

OBSERVE_EVERY_S = 1.0
READY_TIMEOUT_S = 90.0
CALIBRATION_S = 5.0
QUESTION = "What does a paged KV cache save?"


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The options of the demo."""

    folder: Path
    """The folder of the model, the log and the cluster's state."""
    manifest: Path
    duration_s: float
    overload: float
    """The rate of the traffic as a multiple of one replica's measured throughput."""
    scale: float
    """Factor of the trace's prompt and output lengths."""
    scale_down_timeout_s: float


async def run_demo(config: DemoConfig, console: Console) -> Outcome:
    """Run the demo; every process started here has ended when it returns or raises.

    Raises:
        CommandError: a step failed.
    """
    manifest = read_manifest(config.manifest)
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--dir {config.folder}: {error}: name a folder that can be written") from error
    models = config.folder / "models"
    console.rule("1. a tiny Llama")
    await run_command("make-tiny-model", str(models / "tiny-llama"))
    console.rule("2. a cluster on this machine")
    flags = ("--models-root", str(models), "--state-dir", str(config.folder / "state"), "--gateway-port", "0")
    async with (
        UpProcess(config.folder / "up.log", flags) as cluster,
        open_session(timeout_s=300) as session,
        await _connect(cluster.kubeconfig) as api,
    ):
        console.print(f"export KUBECONFIG={cluster.kubeconfig}\ngateway: {cluster.gateway_url}", highlight=False)
        kube = KubeClient(api)
        console.rule("3. a manifest")
        await apply(
            config.manifest, manifest, cluster.kubeconfig, kube, lambda text: console.print(text, highlight=False)
        )
        run = _Run(config, console, session, kube, cluster.gateway_url, manifest["metadata"])
        return await run.run()


async def _connect(kubeconfig: str) -> kubernetes_client.ApiClient:
    configuration = kubernetes_client.Configuration()
    await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=kubeconfig, client_configuration=configuration
    )
    return kubernetes_client.ApiClient(configuration)


class _Run:
    """The steps after the manifest was applied."""

    def __init__(
        self,
        config: DemoConfig,
        console: Console,
        session: aiohttp.ClientSession,
        kube: KubeClient,
        gateway_url: str,
        metadata: dict[str, str],
    ) -> None:
        self._config = config
        self._console = console
        self._session = session
        self._kube = kube
        self._gateway_url = gateway_url
        self._namespace = metadata.get("namespace", "default")
        self._name = metadata["name"]
        self._progress = Progress()
        self._observer = Observer(kube, session, self._namespace, self._name, self._progress)

    async def run(self) -> Outcome:
        say = self._console.print
        started = time.monotonic()
        service = await wait_ready(
            self._kube, self._namespace, self._name, READY_TIMEOUT_S, lambda text: say(f"  {text}", highlight=False)
        )
        status, model = service["status"], service["spec"]["model"].get("servedName", self._name)
        sizing = status["sizing"]
        say(
            f"Ready after {time.monotonic() - started:.0f} s: {sizing['maxNumSeqs']} sequences at once, "
            f"limited by {sizing['limitedBy']}",
            highlight=False,
        )
        self._console.rule("4. tokens")
        say(f"> {QUESTION}", highlight=False)
        await chat(self._session, self._gateway_url, model, QUESTION, self._write)
        say("\n(the model has random weights; the demo shows that tokens are streamed)", highlight=False)
        self._console.rule("5. more load than one replica can serve")
        records, failed = await self._drive(model, sizing["maxNumSeqs"], sizing["maxModelLen"])
        self._console.rule("6. results")
        outcome = summarise(
            self._observer.observations, records, self._observer.decisions, self._config.duration_s, failed
        )
        for line in outcome.lines():
            say(line, highlight=False)
        return outcome

    async def _drive(self, model: str, max_num_seqs: int, max_model_len: int) -> tuple[list[RequestRecord], int]:
        """Calibrate, overload, and watch until the service is scaled down; returns (records, failures before them)."""
        config, target = self._config, Target(self._gateway_url, model)
        lengths = trace_lengths(config.scale, max_model_len)
        word_rate = await measure_word_rate(self._session, target, np.random.default_rng(0))
        held = await calibrate(self._session, target, lengths, word_rate, max_num_seqs, CALIBRATION_S)
        rate = held.requests_per_s * config.overload
        self._console.print(
            f"One replica delivers {held.requests_per_s:.1f} req/s ({held.output_tokens_per_s:.0f} tok/s).\n"
            f"Sending {rate:.1f} req/s for {config.duration_s:g} s, as Poisson arrivals with the lengths of the Azure "
            f"conversation trace × {config.scale:g}.",
            highlight=False,
        )
        self._observer.start_clock()
        load = Load(lengths, rate=rate, duration_s=config.duration_s, seed=2)
        with LiveTable(self._console) as table:
            traffic = asyncio.create_task(drive(self._session, target, load, word_rate, self._progress))
            try:
                await self._watch(table, self._phase, traffic.done)
                records = await traffic
                await self._watch(table, lambda seen: "scaling down", self._back, config.scale_down_timeout_s)
            finally:
                traffic.cancel()
        return records, held.failed

    def _phase(self, seen: Observation) -> str:
        return "load" if seen.time_s < self._config.duration_s else "draining"

    def _back(self) -> bool:
        last = self._observer.observations[-1]
        return last.replicas == last.ready == NEEDED_FINAL

    async def _watch(
        self,
        table: LiveTable,
        phase: Callable[[Observation], str],
        done: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Show an observation every second until `done`, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s if timeout_s else float("inf")
        while time.monotonic() < deadline:
            try:
                seen = await self._observer.observe()
            except KubeError as error:
                self._console.print(f"the API server is unreachable: {error}", highlight=False)
            else:
                table.show(phase(seen), seen)
            if done():
                return
            await asyncio.sleep(OBSERVE_EVERY_S)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
