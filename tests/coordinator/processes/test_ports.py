"""Ports are held for processes that share them, and for nobody else."""

from __future__ import annotations

import socket

import pytest

from coordinator.processes.ports import reserve
from coordinator.settings.units import ListenAddr


def listening(port: int, *, shared: bool) -> socket.socket:
    end = socket.socket()
    if shared:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        end.bind(("127.0.0.1", port))
    except OSError:
        end.close()
        raise
    end.listen()
    return end


def test_a_held_port_takes_no_connection_and_can_be_shared_by_those_who_ask() -> None:
    with reserve(ListenAddr("127.0.0.1", 0), None) as (port, held):
        assert [end.getsockname()[1] for end in held] == [port]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        with pytest.raises(OSError, match="in use"):
            listening(port, shared=False)
        with listening(port, shared=True), socket.create_connection(("127.0.0.1", port), 1):
            pass


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_somebody_listens_on_is_refused_even_if_it_could_be_shared(shared: bool) -> None:
    with listening(0, shared=shared) as taken:
        port = taken.getsockname()[1]
        told = rf"bind on address \('127.0.0.1', {port}\): address already in use"
        with pytest.raises(OSError, match=told), reserve(ListenAddr("127.0.0.1", port), None):
            pass
        with pytest.raises(OSError, match=told), reserve(ListenAddr("127.0.0.1", 0), port):
            pass


def test_no_host_is_every_interface_on_one_port() -> None:
    with reserve(ListenAddr(None, 0), None) as (port, held):
        assert {end.getsockname()[1] for end in held} == {port}
        assert socket.AF_INET in {end.family for end in held}
