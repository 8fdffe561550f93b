"""The binary encoding of protocol buffers, as much of it as the service needs: fields of numbers and bytes.

A message is a sequence of (field number, wire type, value). Only the four wire types of proto3 exist: varint,
8 bytes, length-prefixed bytes, 4 bytes. Fields that nobody asks for are skipped, as every reader must.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10
_SIGN = 1 << 63
_MODULUS = 1 << 64


class WireError(ValueError):
    """Bytes that are no message, or a field of another type than expected."""


# --- reading ------------------------------------------------------------------------------------------------


class Message:
    """The fields of a received message. A field that is absent has its type's zero, as in proto3."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._fields: dict[int, list[tuple[int, int | memoryview]]] = {}
        for number, kind, value in _fields_of(memoryview(data)):
            self._fields.setdefault(number, []).append((kind, value))

    def has(self, number: int) -> bool:
        return number in self._fields

    def raw(self, number: int) -> memoryview:
        pieces = self.all_raw(number)
        return pieces[-1] if pieces else memoryview(b"")

    def all_raw(self, number: int) -> list[memoryview]:
        found = []
        for kind, value in self._fields.get(number, []):
            if kind != BYTES or isinstance(value, int):
                raise WireError(f"field {number} has wire type {kind}, not bytes")
            found.append(value)
        return found

    def text(self, number: int) -> str:
        try:
            return bytes(self.raw(number)).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"field {number} is not UTF-8: {error}") from error

    def message(self, number: int) -> Message:
        return Message(self.raw(number))

    def messages(self, number: int) -> list[Message]:
        return [Message(piece) for piece in self.all_raw(number)]

    def integer(self, number: int) -> int:
        integers = self.integers(number)
        return integers[-1] if integers else 0

    def integers(self, number: int) -> list[int]:
        """A repeated field of integers, packed or not."""
        found: list[int] = []
        for kind, value in self._fields.get(number, []):
            if isinstance(value, int):
                if kind != VARINT:
                    raise WireError(f"field {number} has wire type {kind}, not a varint")
                found.append(_signed(value))
                continue
            place = 0
            while place < len(value):
                part, place = _read_varint(value, place)
                found.append(_signed(part))
        return found

    def double(self, number: int) -> float:
        values = self._fields.get(number)
        if not values:
            return 0.0
        kind, value = values[-1]
        if kind != EIGHT_BYTES or isinstance(value, int):
            raise WireError(f"field {number} has wire type {kind}, not 8 bytes")
        number_read: float = struct.unpack("<d", value)[0]
        return number_read

    def entries(self, number: int) -> Iterator[tuple[str, Message]]:
        """The entries of a map with text keys; the value is field 2 of the entry."""
        for entry in self.messages(number):
            yield entry.text(1), entry


def _fields_of(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("a field has the number 0")
        if kind == VARINT:
            value, place = _read_varint(data, place)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, place = _read_varint(data, place)
        elif kind == EIGHT_BYTES:
            size = 8
        elif kind == FOUR_BYTES:
            size = 4
        else:
            raise WireError(f"field {number} has the unknown wire type {kind}")
        if size > len(data) - place:
            raise WireError(f"field {number} needs {size} bytes; {len(data) - place} are left")
        yield number, kind, data[place : place + size]
        place += size


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for index in range(_LONGEST_VARINT):
        if place >= len(data):
            raise WireError("the message ends inside a number")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value % _MODULUS, place
    raise WireError(f"a number has more than {_LONGEST_VARINT} bytes")


def _signed(value: int) -> int:
    return value - _MODULUS if value >= _SIGN else value


# --- writing ------------------------------------------------------------------------------------------------


class Writer:
    """Collects the fields of a message to send. Zeros are written too: it costs two bytes and is clear."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def integer(self, number: int, value: int) -> Writer:
        self._parts += [_varint(number << 3 | VARINT), _varint(value % _MODULUS)]
        return self

    def double(self, number: int, value: float) -> Writer:
        self._parts += [_varint(number << 3 | EIGHT_BYTES), struct.pack("<d", value)]
        return self

    def raw(self, number: int, value: bytes) -> Writer:
        self._parts += [_varint(number << 3 | BYTES), _varint(len(value)), value]
        return self

    def text(self, number: int, value: str) -> Writer:
        return self.raw(number, value.encode())

    def message(self, number: int, value: Writer) -> Writer:
        return self.raw(number, value.done())

    def map_of_doubles(self, number: int, values: Mapping[str, float]) -> Writer:
        for key, value in values.items():
            self.message(number, Writer().text(1, key).double(2, value))
        return self

    def done(self) -> bytes:
        return b"".join(self._parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
