"""Keeps other processes of the host away from a loopback port of this process.

The runtime can listen on TCP only, and everybody on the host can connect to a loopback port. A socket filter on the
listener drops every packet except those from source ports that this process has bound and admitted. Nobody else can
bind them. Accepted connections keep the filter of the moment, so a port has to stay admitted only until its connection
is established. Linux only, without privileges.
"""

import ctypes
import logging
import socket
import struct
from collections.abc import Collection

from baton.runtimes.dynamo.listener import find_listeners

log = logging.getLogger(__name__)

SO_ATTACH_FILTER = 26
LOOPBACK = 0x7F000001
_SOURCE_ADDRESS = (-0x100000 + 12) & 0xFFFFFFFF  # in the network header, which is at SKF_NET_OFF
_SOURCE_PORT = 0  # in the transport header, where the packet begins for a TCP socket
_LOAD_WORD, _LOAD_HALF, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_DROP = (_RETURN, 0, 0, 0)
_ACCEPT = (_RETURN, 0, 0, 0xFFFFFFFF)

Instruction = tuple[int, int, int, int]
_pack_instruction = struct.Struct("HBBI").pack


class PortGuard:
    """Guards the listener of this process at `port`, until it is closed."""

    def __init__(self, port: int) -> None:
        self._admitted: set[int] = set()
        self._listeners = list(find_listeners(port))
        try:
            self._attach()
        except OSError as error:
            log.warning("other users of this host can reach the frontend without a key: %s", error)
            self.close()

    def admit(self, source_ports: Collection[int]) -> None:
        """Let connections from `source_ports` on 127.0.0.1, which the caller has bound, be established.

        Raises OSError if too many are admitted that have not settled: a filter has at most 4,096 instructions.
        """
        self._admitted.update(source_ports)
        try:
            self._attach()
        except OSError:
            self._admitted.difference_update(source_ports)
            raise

    def settle(self, source_port: int) -> None:
        """The connection is established or has ended."""
        self._admitted.discard(source_port)  # and is dropped from the filter when the next one is admitted

    def close(self) -> None:
        """Let go of the listener. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _attach(self) -> None:
        instructions = _program(sorted(self._admitted))
        code = ctypes.create_string_buffer(b"".join([_pack_instruction(*each) for each in instructions]))
        program = struct.pack("HL", len(instructions), ctypes.addressof(code))
        for listener in self._listeners:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _program(ports: list[int]) -> list[Instruction]:
    instructions = [
        (_LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
        (_JUMP_IF_EQUAL, 1, 0, LOOPBACK),
        _DROP,
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
    ]
    for port in ports:
        instructions += [(_JUMP_IF_EQUAL, 0, 1, port), _ACCEPT]
    return [*instructions, _DROP]
