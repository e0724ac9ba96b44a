"""Ports and pod addresses that no other local cluster on this machine is given."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmservice_local.loopback import AddressBlock, free_port

GIVEN = "from llmservice_local.loopback import free_port; print(*(free_port() for _ in range(200)))"


def test_processes_that_run_at_once_are_given_different_ports() -> None:
    ours = [free_port() for _ in range(200)]
    theirs = subprocess.run([sys.executable, "-c", GIVEN], capture_output=True, text=True, check=True).stdout.split()

    assert len({*ours, *map(int, theirs)}) == 400


def test_an_outgoing_connection_never_gets_one_of_them() -> None:
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")

    assert free_port() < int(ephemeral.split()[0])


def test_a_wanted_port_is_returned_or_an_error_names_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            free_port(port)
    assert free_port(port) == port


def test_two_clusters_get_two_blocks() -> None:
    first, second = AddressBlock(), AddressBlock()
    try:
        assert first.cidr != second.cidr
    finally:
        first.close()
        second.close()


def test_address_comes_back_last_and_a_full_block_says_so() -> None:
    block = AddressBlock()
    try:
        first = block.take()
        block.release(first)
        taken = [block.take() for _ in range(253)]
        assert taken[-1] == first
        assert len(set(taken)) == 253
        with pytest.raises(RuntimeError, match="all 253 pod addresses"):
            block.take()
    finally:
        block.close()
