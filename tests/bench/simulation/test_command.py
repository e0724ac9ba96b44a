import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.stores.model_hub import LLAMA_3_8B, ModelHub
from llmservice_planner.command import main


@pytest.fixture
def files(tmp_path: Path, manifest: dict[str, Any]) -> tuple[Path, Path]:
    """The manifest, and two minutes of traffic that need two replicas."""
    service, trace = tmp_path / "service.yaml", tmp_path / "trace.csv"
    service.write_text(yaml.safe_dump(manifest))
    rows = [f"{number * 0.3},{300 + 37 * (number % 20)},{80 + 13 * (number % 9)}" for number in range(400)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return service, trace


def simulate(files: tuple[Path, Path], *flags: str) -> int:
    return main(["simulate", "-f", str(files[0]), "--trace", str(files[1]), *flags])


def test_the_report_shows_promises_cost_and_decisions(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(files, "--startup", "20s") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("chat on l4: 400 requests in 120 s (3.34/s)\n")
    promised = "99 % of first tokens within 2s; 99 % of the times between a request's tokens within 120ms."
    assert promised in " ".join(shown.split())
    assert "Decisions of builtin: " in shown
    (waits,) = [line.split() for line in shown.splitlines() if line.startswith("builtin  interactive")]
    assert waits[2] == "400"
    assert " 1 -> " in shown


@pytest.mark.slow
def test_policies_are_compared_on_the_same_traffic(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--compare", "builtin,hpa:target=6,static:3,clairvoyant", "--startup", "20s", "--duration", "60s")
    assert simulate(files, *flags, "-o", "json") == 0
    document = json.loads(capsys.readouterr().out)
    by_name = {each["policy"]: each for each in document["policies"]}
    assert list(by_name) == ["builtin", "hpa", "static:3", "clairvoyant"]
    for each in by_name.values():
        assert each["requests"] == 200
        assert sum(each["outcomes"].values()) == 200
        assert 0 < each["gpu_hours"] <= 6 * 60 / 3600
        waits = each["wait_seconds"]["interactive"]
        assert waits["requests"] == 200
        assert 0 <= waits["p50"] <= waits["p99"] < each["ttft_seconds"]["p99"]
        assert each["wait_seconds"]["batch"] == {"requests": 0, "mean": None, "p50": None, "p99": None}
        assert all(decision["reasons"] for decision in each["decisions"])
    assert by_name["static:3"]["gpu_hours"] == pytest.approx(
        3 * document["policies"][0]["duration_seconds"] / 3600, 0.2
    )
    assert by_name["clairvoyant"]["within_slo"]["ttft"] >= 0.99
    assert by_name["clairvoyant"]["gpu_hours"] < by_name["static:3"]["gpu_hours"]


def test_options_tell_runs_of_one_policy_apart(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(files, "--compare", "hpa:target=4, hpa:target=8,kpa:target=8", "-o", "json") == 0
    names = [each["policy"] for each in json.loads(capsys.readouterr().out)["policies"]]
    assert names == ["hpa:target=4", "hpa:target=8", "kpa"]


def test_a_service_that_stays_at_zero_replicas_serves_nothing(
    files: tuple[Path, Path], manifest: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest["spec"]["autoscaling"]["minReplicas"] = 0
    files[0].write_text(yaml.safe_dump(manifest))
    assert simulate(files, "--policy", "hpa") == 0
    shown = capsys.readouterr().out
    assert "0.0 (0-0)" in shown
    assert "400 timed out, such as: no replica became ready within 600 s" in shown


@pytest.mark.parametrize("prefix", [-(2**63), 2**63 + 5, 10**30])
def test_any_whole_number_may_name_a_prefix(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], prefix: int
) -> None:
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 5, "hash_ids": [prefix, at]} for at in range(9)]
    files[1].write_text("\n".join(map(json.dumps, rows)))
    assert simulate(files, "--duration", "10s", "--rate-scale", "2", "-o", "json") == 0
    (policy,) = json.loads(capsys.readouterr().out)["policies"]
    assert policy["outcomes"]["finished"] == 18


def test_requests_that_all_come_at_once_need_a_duration(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n")
    assert simulate(files) == 2
    assert "all requests of the trace come at the same time: say how long to simulate with --duration" in (
        capsys.readouterr().err
    )
    assert simulate(files, "--duration", "10s") == 0


@pytest.mark.slow
def test_a_page_and_a_plot_are_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    page, plot = tmp_path / "report.html", tmp_path / "plot.svg"
    assert simulate(files, "--html", str(page), "--plot", str(plot), "--compare", "builtin,kpa") == 0
    html = page.read_text()
    assert "<svg" in html
    assert "Decisions of builtin" in html
    assert "Decisions of kpa" in html
    assert html.count('<td class="text">interactive</td>') == 2  # the waits of each policy
    assert "http-equiv" not in html
    assert plot.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "vpa"), "there is no policy 'vpa': expected one of builtin, hpa"),
        (("--latency", "/nowhere.json"), "/nowhere.json is no latency model in JSON"),
        (("--html", "/nowhere/report.html"), "/nowhere is no folder: create it"),
        (("--html", "/proc/report.html", "--duration", "5s"), "/proc/report.html cannot be written: "),
        (("--model", "pvc://models/llama"), "pvc://models/llama is a volume of the cluster, which can't be read from"),
        (("--model", "nowhere"), "nowhere/config.json does not exist"),
        (("--plot", "plot.gif"), "plot.gif ends in .gif, expected .svg or .png"),
        (("--warmup", "120s"), "--warmup 120 s leaves no request to measure: shorten it"),
        (("--warmup", "120s", "--duration", "10m"), "--warmup 120 s leaves no request to measure: shorten it"),
        (("--rate-scale", "0.00000001"), "the trace has no request within --duration and --rate-scale: raise them"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert simulate(files, *flags) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"llmservice simulate: {message}")
    assert shown.count("\n") == 1


def test_a_manifest_without_figures_and_a_gpu_without_rates_name_the_remedy(
    files: tuple[Path, Path], manifest: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = manifest["spec"]["model"].pop("shape")
    files[0].write_text(yaml.safe_dump(manifest))
    assert simulate(files) == 2
    error = capsys.readouterr().err
    assert error.endswith("or give --model with a folder or URI that can be read from here\n")
    manifest["spec"]["model"]["shape"] = shape
    del manifest["spec"]["resources"]["gpu"]
    manifest["spec"]["slo"].pop("itlP99")
    files[0].write_text(yaml.safe_dump(manifest))
    assert simulate(files) == 2
    assert "give --latency FILE" in capsys.readouterr().err


def test_a_model_is_read_as_plan_reads_it(
    files: tuple[Path, Path],
    manifest: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a folder, a URI or the hub, of which the size of the weights is read as well."""
    manifest["spec"]["model"] = {"uri": "pvc://models/llama"}
    files[0].write_text(yaml.safe_dump(manifest))
    config = json.dumps(LLAMA_3_8B).encode()
    (tmp_path / "config.json").write_bytes(config)
    index = json.dumps({"metadata": {"total_size": 18 * 2**30}, "weight_map": {}}).encode()
    hub = ModelHub({"config.json": config, "model.safetensors.index.json": index})
    shown = {}
    with hub.serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for model in (str(tmp_path), f"file://{tmp_path}", "org/open", "hf://org/open"):
            assert simulate(files, "--model", model, "--duration", "5s", "-o", "json") == 0
            shown[model] = json.loads(capsys.readouterr().out)["assumptions"][1]
    by_path, by_uri, by_name, by_hub_uri = shown.values()
    assert by_path == by_uri
    assert by_path.startswith("Replica: ")
    assert by_name == by_hub_uri
    assert by_name != by_path  # heavier weights leave less room for the KV cache


def test_a_file_that_is_no_yaml_is_named_in_one_line(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text("a: b: c\n  - d")
    assert simulate(files) == 2
    shown = capsys.readouterr().err
    assert "service.yaml cannot be read as the YAML of a manifest: mapping values are not allowed here" in shown
    assert shown.count("\n") == 1
