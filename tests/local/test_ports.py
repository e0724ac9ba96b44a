"""Ports for components: nobody else is given them between the choice and the bind."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmservice_local.ports import free_port

GIVEN = "from llmservice_local.ports import free_port; print(*(free_port() for _ in range(200)))"


def test_processes_that_run_at_once_are_given_different_ports() -> None:
    ours = [free_port() for _ in range(200)]
    theirs = subprocess.run([sys.executable, "-c", GIVEN], capture_output=True, text=True, check=True).stdout.split()

    assert len({*ours, *map(int, theirs)}) == 400


def test_an_outgoing_connection_never_gets_one_of_them() -> None:
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")

    assert free_port() < int(ephemeral.split()[0])


def test_a_wanted_port_is_given_or_said_to_be_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            free_port(port)
    assert free_port(port) == port
