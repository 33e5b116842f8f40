"""Ports are those that nobody else gets before they are used."""

from __future__ import annotations

import socket

import pytest

from tangram.platform import ports


def test_they_differ_are_free_and_below_those_that_the_kernel_gives_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as kernels:
        kernels.bind(("", 0))
        found = ports.free_ports(20)
        assert len(set(found)) == 20 and max(found) < kernels.getsockname()[1]
    for port in found:
        with socket.socket() as mine:
            mine.bind(("", port))
    monkeypatch.setattr(ports, "LOWEST", found[0])
    monkeypatch.setattr(ports, "FEWEST", 1)
    monkeypatch.setattr(ports, "_kernels_first", lambda: found[0] + 2)
    with socket.socket() as taken:
        taken.bind(("", found[0]))
        assert ports.free_ports(1) == [found[0] + 1]


def test_where_the_kernel_has_all_of_them_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_kernels_first", lambda: 1024)
    assert len(set(ports.free_ports(3))) == 3
