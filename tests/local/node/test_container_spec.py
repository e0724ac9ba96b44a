from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmservice_local.node.container_spec import (
    ConfigError,
    command_line,
    container_mounts,
    cpu_limit,
    environment,
    expand,
    translate,
    volume_paths,
    write_config_maps,
)


def no_claims(name: str) -> None:
    """No claim exists."""


POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"app": "web"}},
    "spec": {"nodeName": "node", "containers": [], "serviceAccountName": "sa"},
    "status": {"podIP": "127.0.9.9", "hostIP": "127.0.0.1"},
}


def lookup(kind: str, name: str) -> Mapping[str, str] | None:
    return {("configmap", "c"): {"a": "1"}, ("secret", "s"): {"token": "hush"}}.get((kind, name))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ([{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}], {"A": "1", "B": "12"}),
        ([{"name": "A", "value": "$(LATER)"}, {"name": "LATER", "value": "1"}], {"A": "$(LATER)", "LATER": "1"}),
        ([{"name": "A", "value": "$$(B)"}], {"A": "$(B)"}),
        ([{"name": "A"}], {"A": ""}),
        ([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}], {"A": "127.0.9.9"}),
        ([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}}], {"A": "web"}),
        ([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}}], {"A": "1"}),
        ([{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}], {"A": "hush"}),
        ([{"name": "A", "valueFrom": {"secretKeyRef": {"name": "x", "key": "k", "optional": True}}}], {}),
        ([{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}], {"A": "2"}),
        (
            [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}}],
            {"A": "1024"},
        ),
    ],
)
def test_environment_is_built_in_order(variables: list[Any], expected: dict[str, str]) -> None:
    container = {"name": "c", "env": variables, "resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}}}
    assert environment(container, POD, lookup) == expected


def test_sources_come_before_single_variables() -> None:
    sources = [{"configMapRef": {"name": "c"}, "prefix": "X_"}, {"secretRef": {"name": "gone", "optional": True}}]
    container = {"name": "c", "envFrom": sources, "env": [{"name": "X_a", "value": "over"}]}
    assert environment(container, POD, lookup) == {"X_a": "over"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"configMapKeyRef": {"name": "x", "key": "k"}}, 'configmap "x" not found'),
        ({"secretKeyRef": {"name": "s", "key": "k"}}, "couldn't find key k in secret s"),
        ({"fieldRef": {"fieldPath": "spec.hostname"}}, "fieldRef spec.hostname is not known"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "sets no such figure"),
        ({"fileKeyRef": {}}, "is not known to the local node"),
    ],
)
def test_missing_source_of_a_variable_keeps_the_container_waiting(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as refused:
        environment({"name": "c", "env": [{"name": "A", "valueFrom": source}]}, POD, lookup)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("$(A)/x", "1/x"), ("$(B)", "$(B)"), ("$$", "$"), ("$$(A)", "$(A)"), ("$A", "$A")]
)
def test_expansion_leaves_alone_what_it_does_not_know(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


def test_command_without_an_image_must_be_given() -> None:
    with pytest.raises(ConfigError, match="needs `command`"):
        command_line({"name": "c", "args": ["x"]}, {}, {})


def test_paths_below_a_mount_become_the_volumes_own(tmp_path: Path) -> None:
    pod = {"spec": {"volumes": [{"name": "m", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/srv/data"}}]}}
    volumes = volume_paths(pod, tmp_path, no_claims)
    mounts = container_mounts(
        {
            "volumeMounts": [
                {"name": "m", "mountPath": "/models"},
                {"name": "h", "mountPath": "/data", "subPath": "sub"},
            ]
        },
        volumes,
    )
    container = {"name": "c", "command": ["run", "--model=/models/a", "/data/x", "/modelsish", "/models"]}
    assert command_line(container, {}, mounts) == [
        "run",
        f"--model={tmp_path}/m/a",
        "/srv/data/sub/x",
        "/modelsish",
        f"{tmp_path}/m",
    ]


def test_file_that_is_really_there_wins_over_a_mount(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert translate(str(model), {str(tmp_path): Path("/elsewhere")}) == str(model)


def test_volume_that_the_node_does_not_have_is_named() -> None:
    pod = {"spec": {"volumes": [{"name": "v", "image": {"reference": "registry/model"}}]}}
    with pytest.raises(ConfigError, match="volume v: the local node has hostPath, emptyDir, configMap and claims"):
        volume_paths(pod, Path("/x"), no_claims)


def test_a_changed_config_map_is_written_anew_and_its_stale_files_go(tmp_path: Path) -> None:
    pod = {"spec": {"volumes": [{"name": "v", "configMap": {"name": "list"}}]}}
    for data in ({"a": "1", "b": "2"}, {"a": "3"}):
        write_config_maps(pod, tmp_path, lambda kind, name, data=data: data)
        assert {file.name: file.read_text() for file in (tmp_path / "v").iterdir()} == data
    with pytest.raises(ConfigError, match='configmap "list" not found'):
        write_config_maps(pod, tmp_path, lambda kind, name: None)


def test_existing_claim_is_a_folder_that_pods_share() -> None:
    pod = {"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "models"}}]}}
    assert volume_paths(pod, Path("/x"), {"models": Path("/claims/models")}.get) == {"v": Path("/claims/models")}
    with pytest.raises(ConfigError, match='persistentvolumeclaim "models" not found'):
        volume_paths(pod, Path("/x"), no_claims)


def test_the_cpu_limit_of_a_container_as_a_number() -> None:
    assert cpu_limit({"resources": {"limits": {"cpu": "400m"}}}) == 0.4
    assert cpu_limit({}) == 0.0
