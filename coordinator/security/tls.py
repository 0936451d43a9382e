"""TLS as llm-d's configuration writes it, which is Go's way, and as Python's ``ssl`` has it.

Certificates are read from a folder with ``tls.crt`` and ``tls.key``, as cert-manager and Kubernetes leave them. A
folder that changes is read again: connections that are there keep what they have, new ones get the new certificate.

Source: Go ``crypto/tls`` (names of versions and suites); llm-d ``--tls-min-version``, ``--tls-cipher-suites``.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envelope.errors import BadRequest, error_body

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSIONS = {"VersionTLS12": ssl.TLSVersion.TLSv1_2, "VersionTLS13": ssl.TLSVersion.TLSv1_3}

_KINDS = {
    "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
    "CHACHA20_POLY1305": "CHACHA20-POLY1305",  # Go has it under both names
    "AES_128_CBC_SHA": "AES128-SHA",
    "AES_256_CBC_SHA": "AES256-SHA",
}

# Go's suites of TLS 1.2 that are not on its insecure list, and what OpenSSL calls them.
SUITES = {
    f"TLS_ECDHE_{proof}_WITH_{go}": f"ECDHE-{proof}-{openssl}"
    for proof in ("ECDSA", "RSA")
    for go, openssl in _KINDS.items()
}

_OF_TLS13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


def parse_version(value: str) -> str:
    """Check a lowest version; empty is TLS 1.2."""
    if value and value not in VERSIONS:
        raise ValueError(f"{value!r} is not a version that is safe to serve, write VersionTLS12 or VersionTLS13")
    return value


def parse_suite(value: str) -> str:
    """Check the name of one suite."""
    if value in _OF_TLS13:
        raise ValueError(f"{value} is of TLS 1.3, whose suites are always all on: take it out")
    if value not in SUITES:
        meant = next(
            (go for go, openssl in SUITES.items() if openssl == value), "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
        )
        raise ValueError(f"{value!r} is not the name in Go of a suite with ECDHE, write {meant} for one")
    return value


_IN_PLAIN = error_body(BadRequest("this port speaks HTTPS, and the request came in plain HTTP: ask for https://"), "")
_ANSWER_IN_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_IN_PLAIN), _IN_PLAIN)
)


class _Context(ssl.SSLContext):
    """Answers a request in plain HTTP with a 400 where a handshake should begin, as nginx does."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, _Handshake)
        made.incoming, made.outgoing = incoming, outgoing
        return made


class _Handshake(ssl.SSLObject):
    """One connection's TLS.

    Attributes:
        incoming, outgoing: what the event loop has read, and what it is going to write.
    """

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    _in_plain = False

    def do_handshake(self) -> None:
        if not self._in_plain:
            try:
                super().do_handshake()
                return
            except ssl.SSLError as error:
                if error.reason != "HTTP_REQUEST":
                    raise
            self._in_plain = True
            self.outgoing.write(_ANSWER_IN_PLAIN)
        # What still comes is thrown away until the client hangs up, or the time of a handshake is over: a connection
        # that is closed with something unread is reset, and the client may never read its answer.
        self.incoming.read()
        raise ssl.SSLWantReadError


class Certificate:
    """A folder's certificate and key, as a context for a server, and what replaces them.

    Each handshake is given a context that holds one pair. Another pair in the same context would not do: OpenSSL keeps
    one of each kind, and would go on serving an old RSA certificate beside a new one of ECDSA.

    Raises:
        ValueError: a file is missing or not what it should be; the sentence names it.
    """

    def __init__(self, folder: str, min_version: str = "", suites: Sequence[str] = ()) -> None:
        self.files = (str(Path(folder, "tls.crt")), str(Path(folder, "tls.key")))
        self._min_version = VERSIONS.get(min_version, ssl.TLSVersion.TLSv1_2)
        self._suites = ":".join(SUITES[name] for name in suites)
        self._current = self._pair()
        self.context = self._new()
        self.context.sni_callback = self._choose

    def read(self) -> None:
        """Take what the files hold now; where they do not fit together, what was there before stays."""
        self._current = self._pair()

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _pair(self) -> ssl.SSLContext:
        context = self._new()
        _load(context, *self.files)
        return context

    def _new(self) -> ssl.SSLContext:
        """Return a context with every setting: OpenSSL takes some of them from the one that it is given last."""
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _Handshake
        context.minimum_version = self._min_version
        context.set_alpn_protocols(["http/1.1"])
        if self._suites:
            context.set_ciphers(self._suites)
        return context


def client_context(ca_file: str | None, *, verify: bool = True) -> ssl.SSLContext | None:
    """Return how a role's workers are verified, or None where the system's authorities do it.

    Raises:
        ValueError: the file cannot be read, or holds no certificate.
    """
    if not verify:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if ca_file is None:
        return None
    _must_hold(ca_file, "CERTIFICATE")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise ValueError(f"{ca_file} holds no certificate that can be read") from None


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    _must_hold(certificate, "CERTIFICATE")
    _must_hold(key, "PRIVATE KEY")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{certificate} and {key} do not belong together") from None
        raise ValueError(f"{certificate} or {key} is broken, or the key wants a password") from None
    except OSError as error:  # taken away since they were looked at
        raise ValueError(f"{certificate} or {key} cannot be read: {error.strerror}") from None


def _no_password() -> str:
    """Answer for an encrypted key, for which OpenSSL would ask the terminal."""
    return ""


def _must_hold(path: str, label: str) -> None:
    try:
        text = Path(path).read_text("latin-1")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if f"{label}-----" not in text:
        raise ValueError(f"{path} holds no {label.lower()} in PEM form")
