import pytest

from llmservice_server.cuda_allocator import configure


def test_segments_may_grow_unless_the_user_decides() -> None:
    environment = {"PATH": "/bin"}
    configure(environment)
    assert environment == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_users_own_settings_are_left_alone(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    configure(environment)
    assert environment == {name: "max_split_size_mb:64"}
