from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.status.merge_patch import merge_patch

leaves = st.one_of(st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
objects = st.recursive(
    st.dictionaries(st.sampled_from("abc"), leaves, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(leaves, inner), max_size=3),
    max_leaves=6,
)


def apply(target: Any, patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386, section 2, as it is written there."""
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply(result.get(key), value) if isinstance(value, dict) else value
    return result


@given(before=objects, after=objects)
def test_applying_the_patch_gives_the_object_that_was_wanted(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, merge_patch(before, after)) == after


@given(same=objects)
def test_equal_objects_need_no_patch(same: dict[str, Any]) -> None:
    assert merge_patch(same, same) == {}
