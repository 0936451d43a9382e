"""A name server on 127.0.0.1, over UDP, and over TCP where an answer is too large for that."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


@dataclass
class DnsServer:
    """Answers from its records.

    Attributes:
        records: TTL and texts by name and type, such as ``("a.test.", "A"): (5, ["10.0.0.1"])``.
        rcode: what every answer says instead.
        silent: queries get no answer.
        truncates: over UDP no answer is whole.
        asked: name, type and transport of each query.
    """

    records: dict[tuple[str, str], tuple[int, list[str]]] = field(default_factory=dict)
    rcode: str = ""
    silent: bool = False
    truncates: bool = False
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    address: str = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._stream, "127.0.0.1", 0)
        port = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), ("127.0.0.1", port))
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()

    def answer(self, wire: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind, transport))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        if self.rcode:
            response.set_rcode(dns.rcode.from_text(self.rcode))
        elif self.truncates and transport == "udp":
            response.flags |= dns.flags.TC
        else:
            self._fill(response, name, kind)
        return response.to_wire()

    def _fill(self, response: dns.message.Message, name: str, kind: str) -> None:
        if not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        while cname := self.records.get((name, "CNAME")):
            response.answer.append(dns.rrset.from_text(name, cname[0], "IN", "CNAME", cname[1][0]))
            name = cname[1][0]
        if found := self.records.get((name, kind)):
            response.answer.append(dns.rrset.from_text(name, found[0], "IN", kind, *found[1]))

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wire = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
            if (answer := self.answer(wire, "tcp")) is not None:
                writer.write(len(answer).to_bytes(2) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if (answer := self._server.answer(data, "udp")) is not None:
            self._transport.sendto(answer, addr)
