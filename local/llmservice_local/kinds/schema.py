"""Structural schemas: list and map types, defaulting, pruning and validation with the messages of the API server.

Reference: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llmservice_local.errors import FieldError
from llmservice_operator.api.units import amount

Schema = Mapping[str, Any]

ANY: Schema = {"x-kubernetes-preserve-unknown-fields": True}
"""The schema of a value without one: maps merge by key, lists are replaced."""

_METADATA_PARENTS = ("apiVersion", "kind", "metadata")
_KEY_DEFAULTS = {"protocol": "TCP"}  # the only optional key of a built-in list


def field_schema(schema: Schema, name: str) -> Schema:
    """The schema of an object's field."""
    properties = schema.get("properties")
    if properties and name in properties:
        found: Schema = properties[name]
        return found
    additional = schema.get("additionalProperties")
    return additional if isinstance(additional, dict) else ANY


def declares(schema: Schema, name: str) -> bool:
    """Whether an object may have the field; one without properties may have any, which are pruned."""
    if schema.get("x-kubernetes-embedded-resource") and name in _METADATA_PARENTS:
        return True
    properties = schema.get("properties")
    return not properties or name in properties


def item_schema(schema: Schema) -> Schema:
    """The schema of a list's items."""
    found = schema.get("items")
    return found if isinstance(found, dict) else ANY


def is_atomic_map(schema: Schema) -> bool:
    return schema.get("x-kubernetes-map-type") == "atomic"


def is_set(schema: Schema) -> bool:
    return schema.get("x-kubernetes-list-type") == "set"


def map_keys(schema: Schema) -> tuple[str, ...]:
    """The fields that identify an item of a list-map; empty for other lists."""
    if schema.get("x-kubernetes-list-type") != "map":
        return ()
    return tuple(schema.get("x-kubernetes-list-map-keys") or ())


def item_key(item: Any, keys: Sequence[str], schema: Schema = ANY) -> str:
    """The keys of a list-map item as canonical JSON: `{"name":"server"}`.

    An absent key has its default, or null if there is none.
    """
    found: dict[str, Any] = {}
    for key in keys:
        value = item.get(key) if isinstance(item, dict) else None
        if value is None:
            value = field_schema(schema, key).get("default", _KEY_DEFAULTS.get(key))
        found[key] = value
    return canonical(found)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def with_defaults(value: Any, schema: Schema) -> Any:
    """The value with the schema's defaults, level by level; a null that is not allowed counts as absent."""
    if isinstance(value, dict):
        result = dict(value)
        for name, below in (schema.get("properties") or {}).items():
            if result.get(name) is None and "default" in below and not below.get("nullable"):
                result[name] = copy.deepcopy(below["default"])
        return {name: with_defaults(item, field_schema(schema, name)) for name, item in result.items()}
    if isinstance(value, list):
        return [with_defaults(item, item_schema(schema)) for item in value]
    return value


def pruned(value: Any, schema: Schema, path: str = "") -> tuple[Any, list[str]]:
    """The value without unknown fields and without nulls that are not allowed, and the paths of the unknown fields."""
    unknown: list[str] = []
    if isinstance(value, dict):
        result = {}
        for name, item in value.items():
            at = f"{path}.{name}" if path else name
            known = name in (schema.get("properties") or {}) or isinstance(schema.get("additionalProperties"), dict)
            if not known and not _accepts_unknown(schema, path, name):
                unknown.append(at)
                continue
            below = field_schema(schema, name)
            if item is None and known and not below.get("nullable"):
                continue
            result[name], deeper = pruned(item, below, at)
            unknown += deeper
        return result, unknown
    if isinstance(value, list):
        items = []
        for index, item in enumerate(value):
            kept, deeper = pruned(item, item_schema(schema), f"{path}[{index}]")
            items.append(kept)
            unknown += deeper
        return items, unknown
    return value, unknown


def validate(value: Any, schema: Schema, path: str = "") -> Iterator[FieldError]:
    """Every violation of the schema."""
    if schema is ANY or (value is None and schema.get("nullable")):
        return
    if wrong := _wrong_type(value, schema, path):
        yield wrong
        return
    if (allowed := schema.get("enum")) and value not in allowed:
        listed = ", ".join(_shown(str(choice)) for choice in allowed)
        yield FieldError(
            path, "FieldValueNotSupported", f"Unsupported value: {_shown(value)}: supported values: {listed}"
        )
    if isinstance(value, dict):
        yield from _validate_object(value, schema, path)
    elif isinstance(value, list):
        yield from _validate_list(value, schema, path)
    elif isinstance(value, str):
        yield from _validate_string(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _validate_number(value, schema, path)
    yield from _validate_combinations(value, schema, path)


def _accepts_unknown(schema: Schema, path: str, name: str) -> bool:
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("additionalProperties") is True:
        return True
    if path in {"metadata", ""} or schema.get("x-kubernetes-embedded-resource"):
        return path == "metadata" or name in _METADATA_PARENTS
    return False


def _anything(_value: Any) -> bool:
    return True


_FITS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    ),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
"""Whether a value is of a type."""


def _wrong_type(value: Any, schema: Schema, path: str) -> FieldError | None:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, int | str) and not isinstance(value, bool):
            return None
        return _invalid(path, value, f"{path} in body must be of type integer or string")
    wanted = schema.get("type")
    if wanted is None or _FITS.get(wanted, _anything)(value):
        return None
    actual = json_type(value)
    return FieldError(
        path,
        "FieldValueTypeInvalid",
        f'Invalid value: "{actual}": {path or "body"} in body must be of type {wanted}: "{actual}"',
    )


def _validate_object(value: Mapping[str, Any], schema: Schema, path: str) -> Iterator[FieldError]:
    for name in schema.get("required") or []:
        if name not in value:
            yield FieldError(f"{path}.{name}" if path else name, "FieldValueRequired", "Required value")
    count = len(value)
    if (most := schema.get("maxProperties")) is not None and count > most:
        yield FieldError(path, "FieldValueTooMany", f"Too many: {count}: must have at most {most} items")
    if (least := schema.get("minProperties")) is not None and count < least:
        yield _invalid(path, "object", f"{path} in body should have at least {least} properties")
    for name, item in value.items():
        yield from validate(item, field_schema(schema, name), f"{path}.{name}" if path else name)


def _validate_list(value: list[Any], schema: Schema, path: str) -> Iterator[FieldError]:
    if (most := schema.get("maxItems")) is not None and len(value) > most:
        yield FieldError(path, "FieldValueTooMany", f"Too many: {len(value)}: must have at most {most} items")
    if (least := schema.get("minItems")) is not None and len(value) < least:
        yield _invalid(path, "array", f"{path} in body should have at least {least} items")
    below, keys = item_schema(schema), map_keys(schema)
    seen: set[str] = set()
    for index, item in enumerate(value):
        at = f"{path}[{index}]"
        yield from validate(item, below, at)
        if schema.get("x-repeated") or (not keys and not is_set(schema)):
            continue
        identity = item_key(item, keys, below) if keys else canonical(item)
        if identity in seen:
            yield FieldError(at, "FieldValueDuplicate", f"Duplicate value: {identity}")
        seen.add(identity)


def _validate_string(value: str, schema: Schema, path: str) -> Iterator[FieldError]:
    if (most := schema.get("maxLength")) is not None and len(value) > most:
        yield FieldError(path, "FieldValueTooLong", f"Too long: may not be more than {most} bytes")
    if (least := schema.get("minLength")) is not None and len(value) < least:
        yield _invalid(path, value, f"{path} in body should be at least {least} chars long")
    if (pattern := schema.get("pattern")) is not None and not _compiled(pattern).search(value):
        yield _invalid(path, value, f"{path} in body should match '{pattern}'")
    if schema.get("format") == "date-time" and not _DATE_TIME.match(value):
        yield _invalid(path, value, f'{path} in body must be of type date-time: "{value}"')
    if schema.get("format") == "byte" and not _BASE64.fullmatch(re.sub(r"[\r\n]", "", value)):
        yield _invalid(path, value, f"{path} in body must be of type byte: illegal base64 data")


def _validate_number(value: float, schema: Schema, path: str) -> Iterator[FieldError]:
    if (least := schema.get("minimum")) is not None:
        if schema.get("exclusiveMinimum") and value <= least:
            yield _invalid(path, value, f"{path} in body should be greater than {least}")
        elif value < least:
            yield _invalid(path, value, f"{path} in body should be greater than or equal to {least}")
    if (most := schema.get("maximum")) is not None:
        if schema.get("exclusiveMaximum") and value >= most:
            yield _invalid(path, value, f"{path} in body should be less than {most}")
        elif value > most:
            yield _invalid(path, value, f"{path} in body should be less than or equal to {most}")
    if (step := schema.get("multipleOf")) is not None and value % step:
        yield _invalid(path, value, f"{path} in body should be a multiple of {step}")


def _validate_combinations(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    for part in schema.get("allOf") or []:
        yield from validate(value, part, path)
    if (choices := schema.get("anyOf")) and not any(_fits(value, choice) for choice in choices):
        yield _invalid(path, value, f"{path} in body must validate at least one schema (anyOf)")
    if (choices := schema.get("oneOf")) and sum(_fits(value, choice) for choice in choices) != 1:
        yield _invalid(path, value, f"{path} in body must validate one and only one schema (oneOf)")
    if (refused := schema.get("not")) is not None and _fits(value, refused):
        yield _invalid(path, value, f"{path} in body must not validate the schema (not)")


def _fits(value: Any, schema: Schema) -> bool:
    return next(validate(value, schema), None) is None


def mistyped(value: Any, schema: Schema) -> str | None:
    """The type of the schema, where the value has another; null is of every type."""
    wanted: str | None = schema.get("type")
    return None if value is None or wanted is None or _FITS.get(wanted, _anything)(value) else wanted


def with_quantities(value: Any, schema: Schema) -> Any:
    """The value with its quantities as text, as clients expect them; raises ValueError where a text is no quantity."""
    if schema is ANY:
        return value
    if isinstance(value, dict):
        return {name: with_quantities(item, field_schema(schema, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [with_quantities(item, item_schema(schema)) for item in value]
    if schema.get("format") != "quantity" or isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    try:
        amount(text := str(value).strip())
    except ValueError as error:
        raise ValueError("unable to parse quantity's suffix" if _QUANTITY.search(text) else _BAD_QUANTITY) from error
    return text


def json_type(value: Any) -> str:
    """The JSON schema name of a value's type."""
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def _invalid(path: str, value: Any, why: str) -> FieldError:
    return FieldError(path, "FieldValueInvalid", f"Invalid value: {_shown(value)}: {why}")


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, dict | list) else f'"{json_type(value)}"'


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(go_pattern(pattern))


def go_pattern(pattern: str) -> str:
    """The pattern with Go's meaning: `$` matches at the end of the text only, not before a last line feed."""
    return re.sub(r"(\\.)|(\[(?:\\.|[^\]])*\])|(\$)", lambda m: r"\Z" if m[3] else m[0], pattern)


_QUANTITY = re.compile(r"^([+-]?[0-9]+(\.[0-9]*)?|[+-]?\.[0-9]+)([eEinumkKMGTP]*[-+]?[0-9]*)\Z")
_BAD_QUANTITY = r"quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
_BASE64 = re.compile(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_DATE_TIME = re.compile(r"^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:?\d\d)$")
