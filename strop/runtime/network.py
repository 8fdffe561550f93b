"""Ports, addresses and network interfaces of this machine.

Everything that starts or connects processes uses these functions: local ranks, ranks on a Ray cluster,
training workers and the group that broadcasts weights. This file imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket

SIOCGIFADDR = 0x8915
"""Number of the Linux system call that returns the IPv4 address of an interface."""


def free_port() -> int:
    """Return a TCP port that no process of this machine uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str:
    """Return the address of this machine on the network that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: no packet is sent
        return str(probe.getsockname()[0])


def interface_of_address(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, or None."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                request = name[:15].encode().ljust(256, b"\0")
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def network_environment(address: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface of `address`.

    Machines of a cluster know each other by this address; the host name may resolve to another interface.
    Variables that the user has set are left alone.
    """
    name = interface_of_address(address)
    if name is None:
        return {}
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: name for variable in variables if variable not in os.environ}
