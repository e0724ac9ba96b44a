"""The command line, environment and mounts of a container spec, as pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from llmservice_local.objects import Object
from llmservice_operator.api.units import amount

Lookup = Callable[[str, str], Mapping[str, str] | None]
"""(`configmap` or `secret`, name) -> its data, or None if it does not exist."""

Claims = Callable[[str], Path | None]
"""The name of a PersistentVolumeClaim -> its folder, or None if the claim does not exist."""

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class ConfigError(Exception):
    """A container that cannot be started with its spec; the error is the message of its waiting state."""


def environment(container: Object, pod: Object, lookup: Lookup) -> dict[str, str]:
    """The variables of `envFrom` and `env`, in order, with `$(NAME)` expanded. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        found |= _whole_source(source, lookup)
    for variable in container.get("env") or []:
        if "valueFrom" in variable:
            value = _value_from(variable["valueFrom"], container, pod, lookup)
            if value is None:
                continue
        else:
            value = expand(variable.get("value") or "", found)
        found[variable["name"]] = value
    return found


def command_line(container: Object, env: Mapping[str, str], mounts: Mapping[str, Path]) -> list[str]:
    """`command` and `args` with `$(NAME)` expanded and mount paths replaced by the volumes' folders.

    Paths below a mount are rewritten because the processes have no mount namespace.
    """
    if not container.get("command"):
        message = f"the local node runs commands, not images: container {container['name']} needs `command`"
        raise ConfigError(message)
    words = [*container["command"], *(container.get("args") or [])]
    return [translate(expand(word, env), mounts) for word in words]


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expands `$(NAME)` if NAME is defined; others stay, and `$$` is a dollar sign, as in Kubernetes."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return _REFERENCE.sub(replaced, text)


def translate(word: str, mounts: Mapping[str, Path]) -> str:
    """A word that is a path below a mount, or an option `--name=PATH` with one, with the path of the volume's folder.

    A path that exists on this machine stays, because the path of a `file://` model may be below a mount path, too.
    """
    option, equals, path = word.partition("=")
    prefix, path = (f"{option}=", path) if equals and option.startswith("-") else ("", word)
    for mount in sorted(mounts, key=len, reverse=True):
        below = path == mount or path.startswith(mount.rstrip("/") + "/")
        if below and (path == mount or not Path(path).exists()):
            return f"{prefix}{mounts[mount]}{path[len(mount.rstrip('/')) :]}"
    return word


def volume_paths(pod: Object, root: Path, claims: Claims) -> dict[str, Path]:
    """The folder of each of the pod's volumes (emptyDir and configMap below `root`). Raises `ConfigError`."""
    found = {}
    for volume in pod["spec"].get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if (folder := claims(claim)) is None:
                raise ConfigError(f'persistentvolumeclaim "{claim}" not found')
            found[volume["name"]] = folder
            continue
        if "hostPath" in volume:
            found[volume["name"]] = Path(volume["hostPath"]["path"])
        elif "emptyDir" in volume or "configMap" in volume:
            found[volume["name"]] = root / volume["name"]
        elif "projected" not in volume and "secret" not in volume:
            kind = next((name for name in volume if name != "name"), "nothing")
            raise ConfigError(
                f"volume {volume['name']}: the local node has hostPath, emptyDir, configMap and claims, not {kind}"
            )
    return found


def write_config_maps(pod: Object, root: Path, lookup: Lookup) -> None:
    """Write the pod's volumes of ConfigMaps, also while it runs: each file is replaced as a whole.

    Raises `ConfigError` where a ConfigMap is missing.
    """
    for volume in pod["spec"].get("volumes") or []:
        if (source := volume.get("configMap")) is None:
            continue
        folder, data = root / volume["name"], lookup("configmap", source["name"])
        if data is None and not source.get("optional"):
            raise ConfigError(f'configmap "{source["name"]}" not found')
        folder.mkdir(parents=True, exist_ok=True)
        for key, text in (data or {}).items():
            if not (file := folder / key).exists() or file.read_text(encoding="utf-8") != text:
                unfinished = folder / f".{key}"
                unfinished.write_text(text, encoding="utf-8")
                unfinished.replace(file)
        for stale in [file for file in folder.iterdir() if file.name not in (data or {})]:
            stale.unlink()


def container_mounts(container: Object, volumes: Mapping[str, Path]) -> dict[str, Path]:
    """The folder of each of a container's mount paths, except /dev/shm, which is the machine's."""
    return {
        mount["mountPath"]: volumes[mount["name"]] / mount.get("subPath", "")
        for mount in container.get("volumeMounts") or []
        if mount["name"] in volumes and mount["mountPath"] != "/dev/shm"  # noqa: S108 - a mount path, not a file of ours
    }


def cpu_limit(container: Object) -> float:
    """The CPU limit in cores, 0 without one."""
    limit = ((container.get("resources") or {}).get("limits") or {}).get("cpu")
    return float(amount(limit)) if limit is not None else 0.0


def _whole_source(source: Object, lookup: Lookup) -> dict[str, str]:
    for field, kind in (("configMapRef", "configmap"), ("secretRef", "secret")):
        if field in source:
            data = lookup(kind, source[field]["name"])
            if data is None and not source[field].get("optional"):
                raise ConfigError(f'{kind} "{source[field]["name"]}" not found')
            return {source.get("prefix", "") + key: value for key, value in (data or {}).items()}
    return {}


def _value_from(source: Object, container: Object, pod: Object, lookup: Lookup) -> str | None:
    if "fieldRef" in source:
        return _pod_field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource_field(source["resourceFieldRef"], container, pod)
    for field, kind in (("configMapKeyRef", "configmap"), ("secretKeyRef", "secret")):
        if field in source:
            reference = source[field]
            data = lookup(kind, reference["name"])
            if data is not None and reference["key"] in data:
                return data[reference["key"]]
            if reference.get("optional"):
                return None
            if data is None:
                raise ConfigError(f'{kind} "{reference["name"]}" not found')
            raise ConfigError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
    raise ConfigError(f"valueFrom {sorted(source)} is not known to the local node")


def _pod_field(pod: Object, path: str) -> str:
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    if match := _SUBSCRIPT.match(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": status.get("hostIP", ""),
    }
    if path not in known:
        raise ConfigError(f"fieldRef {path} is not known: expected one of {', '.join(known)}")
    return str(known[path])


def _resource_field(reference: Object, container: Object, pod: Object) -> str:
    name = reference.get("containerName", container["name"])
    containers: Sequence[Object] = [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]
    chosen = next((candidate for candidate in containers if candidate["name"] == name), container)
    side, _, resource = reference["resource"].partition(".")
    quantity = ((chosen.get("resources") or {}).get(side) or {}).get(resource)
    if quantity is None:
        raise ConfigError(f"resourceFieldRef {reference['resource']}: container {name} sets no such figure")
    divisor = amount(reference.get("divisor") or 1) or Fraction(1)
    return str(-(-amount(quantity) // divisor))  # rounded up, as Kubernetes does
