"""Certificates in a folder: what is refused at the start, and how one that is renewed is served."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.security.tls import SUITES, VERSIONS, Certificate, client_context, parse_suite, parse_version

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = Path(__file__).resolve().parents[2] / "data" / "tls"
LOCKED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGjMF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBCf1FzWhYQ0Ag8UyV2a
-----END ENCRYPTED PRIVATE KEY-----
"""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """``folder("rsa", key=..)`` is a folder with that pair, and the text in the place of a file; None takes it away."""

    def made(pair: str = "rsa", **changed: str | None) -> str:
        for name in ("crt", "key"):
            file = tmp_path / f"tls.{name}"
            shutil.copy(PAIRS / pair / f"tls.{name}", file)
            if name in changed:
                text = changed[name]
                file.unlink() if text is None else file.write_text(text)
        return str(tmp_path)

    return made


def text_of(pair: str, name: str) -> str:
    return (PAIRS / pair / f"tls.{name}").read_text()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"crt": None}, "{folder}/tls.crt cannot be read: No such file or directory"),
        ({"key": None}, "{folder}/tls.key cannot be read: No such file or directory"),
        ({"crt": "hello"}, "{folder}/tls.crt holds no certificate in PEM form"),
        ({"key": ""}, "{folder}/tls.key holds no private key in PEM form"),
        ({"key": text_of("rsa", "crt")}, "{folder}/tls.key holds no private key in PEM form"),
        ({"key": LOCKED}, "{folder}/tls.crt or {folder}/tls.key is broken, or the key wants a password"),
        ({"crt": text_of("ecdsa", "crt")}, "{folder}/tls.crt and {folder}/tls.key do not belong together"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    folder: Callable[..., str], changed: dict[str, str | None], sentence: str
) -> None:
    path = folder(**changed)
    with pytest.raises(ValueError) as told:
        Certificate(path)
    expected = sentence.format(folder=path)
    if "do not belong together" in expected:  # OpenSSL has two ways to say so of two kinds of keys
        assert str(told.value) in (expected, f"{path}/tls.crt or {path}/tls.key is broken, or the key wants a password")
    else:
        assert str(told.value) == expected


def test_an_authority_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/nowhere cannot be read: No such file"):
        client_context("/nowhere")
    (tmp_path / "ca").write_text("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n")
    with pytest.raises(ValueError, match="holds no certificate that can be read"):
        client_context(str(tmp_path / "ca"))


def test_servers_are_verified_unless_the_configuration_says_otherwise() -> None:
    assert client_context(None) is None
    own = client_context(str(PAIRS / "rsa" / "tls.crt"))
    assert own is not None and (own.verify_mode, own.check_hostname) == (ssl.CERT_REQUIRED, True)
    blind = client_context(None, verify=False)
    assert blind is not None and (blind.verify_mode, blind.check_hostname) == (ssl.CERT_NONE, False)


@pytest.mark.parametrize("name", SUITES)
def test_openssl_knows_each_suite_that_is_accepted(name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(SUITES[parse_suite(name)])
    assert SUITES[name] in [cipher["name"] for cipher in context.get_ciphers()]


@pytest.mark.parametrize("name", ["VersionTLS10", "VersionTLS11", "TLSv1.2", "1.3"])
def test_an_old_version_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write VersionTLS12 or VersionTLS13"):
        parse_version(name)
    assert [parse_version(good) for good in ("", *VERSIONS)] == ["", *VERSIONS]


async def served(certificate: Certificate, client: ssl.SSLContext, name: str | None = None) -> tuple[str, str, bytes]:
    """Connect once; return the version and the suite that were agreed on, and the certificate that was shown."""

    async def hello(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=certificate.context)
    async with server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port, ssl=client, server_hostname=name or host)
        assert await reader.read() == b"hello"
        tls = writer.get_extra_info("ssl_object")
        shown = tls.getpeercert(binary_form=True)
        assert tls.selected_alpn_protocol() in (None, "http/1.1")
        suite, version, _ = tls.cipher()
        writer.close()
        return version, suite, shown


def der(pair: str) -> bytes:
    text = text_of(pair, "crt")
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN") :])


def trusting(pair: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(PAIRS / pair / "tls.crt"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@pytest.mark.parametrize("name", [None, "localhost"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_certificate_that_is_replaced_is_served_to_whoever_comes_next(
    folder: Callable[..., str], version: ssl.TLSVersion, name: str | None
) -> None:
    """Of another kind too; by name (SNI) and by address, in either version."""
    certificate = Certificate(folder("rsa"))
    clients = {pair: trusting(pair) for pair in ("rsa", "ecdsa")}
    for client in clients.values():
        client.minimum_version = client.maximum_version = version
    assert (await served(certificate, clients["rsa"], name))[2] == der("rsa")
    folder("ecdsa")
    certificate.read()
    assert (await served(certificate, clients["ecdsa"], name))[2] == der("ecdsa")


async def test_half_of_a_new_pair_does_not_take_the_old_one_away(folder: Callable[..., str]) -> None:
    certificate = Certificate(folder("rsa"))
    folder("rsa", crt=text_of("ecdsa", "crt"))
    with pytest.raises(ValueError, match=r"tls\.key"):
        certificate.read()
    assert (await served(certificate, trusting("rsa")))[2] == der("rsa")


def test_a_pair_that_is_taken_away_while_it_is_read_leaves_the_old_one(
    folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder()
    certificate = Certificate(path)
    there = certificate._current

    def lose(file: object, label: object) -> None:
        Path(path, "tls.key").unlink(missing_ok=True)

    monkeypatch.setattr("coordinator.security.tls._must_hold", lose)
    with pytest.raises(ValueError, match=r"tls\.key cannot be read: No such file or directory"):
        certificate.read()
    assert certificate._current is there


async def test_the_lowest_version_and_the_suites_hold_after_a_renewal_too(folder: Callable[..., str]) -> None:
    suite = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
    certificate = Certificate(folder("rsa"), "VersionTLS12", [suite])
    certificate.read()
    old = trusting("rsa")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert (await served(certificate, old))[:2] == ("TLSv1.2", SUITES[suite])
    newer = Certificate(folder("rsa"), "VersionTLS13")
    assert (await served(newer, trusting("rsa")))[0] == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await served(newer, old)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
async def test_a_request_in_plain_http_is_told_what_the_port_speaks(folder: Callable[..., str], method: str) -> None:
    loop, context = asyncio.get_running_loop(), Certificate(folder()).context
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    writer.write(f"{method} / HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    writer.write_eof()
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"this port speaks HTTPS" in answer
    writer.close()
    server.close()
