import pytest

from llmservice_server.types.errors import first_line


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("out of memory\nand a trace", "RuntimeError: out of memory"),
        ("\n at 1:2", "RuntimeError: at 1:2"),
        ("", "RuntimeError"),
    ],
)
def test_an_error_is_described_by_its_first_line(message: str, expected: str) -> None:
    assert first_line(RuntimeError(message)) == expected
