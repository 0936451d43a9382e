"""TLS towards clients and towards workers: which certificate is shown, which is believed, and what is refused."""

import asyncio
import json
import shutil
import ssl
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from coordinator.app import build
from coordinator.config import Config, ConfigError
from coordinator.http.connection import Patience
from coordinator.http.server import Server
from tests.bounds import HANG_S
from tests.flows.conftest import config_tree

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ROOT / "tests" / "data" / "tls"
CHAT = "/v1/chat/completions"
ANSWER = {"id": "a", "object": "chat.completion", "choices": [{"index": 0, "message": {"content": "hi"}}]}


def trusting(pair):
    return ssl.create_default_context(cafile=str(PAIRS / pair / "tls.crt"))


@pytest.fixture
def folder(tmp_path):
    """``folder("rsa")`` puts that pair into the folder of the certificate."""

    def put(pair, name="tls"):
        (tmp_path / name).mkdir(exist_ok=True)
        for file in ("tls.crt", "tls.key"):
            shutil.copy(PAIRS / pair / file, tmp_path / name / file)
        return str(tmp_path / name)

    return put


async def get(url, path, tls, **options):
    async with aiohttp.ClientSession() as session, session.get(url + path, ssl=tls, **options) as answer:
        return answer.status, await answer.text()


async def test_a_handshake_has_the_time_of_a_head(folder):
    """Which is a minute where heads have no limit, and so is the other to end."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(f"{folder('rsa')}/tls.crt", f"{folder('rsa')}/tls.key")
    servers = [Server({}), Server({}, patience=Patience(head_s=0.2))]
    ends, writers = [], []
    for server in servers:
        await server.listen("127.0.0.1", 0, tls)
        reader, writer = await asyncio.open_connection(*server.addresses[0].split(":"))
        ends.append(asyncio.create_task(reader.read()))
        writers.append(writer)
    await asyncio.wait(ends, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
    assert [end.done() for end in ends] == [False, True]
    for end, writer, server in zip(ends, writers, servers, strict=True):
        writer.close()
        await asyncio.wait((end,))
        await server.close()


@pytest.fixture
def serve(fleet, tmp_path):
    """``async with serve(server={..}) as (url, lines)``: ``coordinator serve`` as a process of its own."""

    class Serving:
        def __init__(self, **changes):
            self.file = tmp_path / "pd.json"
            self.file.write_text(json.dumps(config_tree(fleet, "alone", {}, changes)))

        async def __aenter__(self):
            command = [sys.executable, "-m", "coordinator", "serve", "--config", str(self.file)]
            self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)
            self.lines = []
            while line := (await asyncio.wait_for(self.process.stderr.readline(), HANG_S)).decode():
                self.lines.append(line)
                if '"listening"' in line:
                    return f"https://{json.loads(line)['address']}", self.lines
            return None, self.lines

        async def __aexit__(self, *error):
            if self.process.returncode is None:
                self.process.terminate()
            await asyncio.wait_for(self.process.communicate(), HANG_S)

    return Serving


async def test_a_served_port_speaks_tls_and_nothing_else(serve, folder, unused_tcp_port):
    """Main port and metrics port, each with its certificate, in the process that operators run."""
    metrics = {"metrics_port": unused_tcp_port, "metrics_cert_dir": folder("ecdsa", "metrics")}
    server = {"secure_serving": True, "cert_path": folder("rsa"), "listen_addr": "127.0.0.1:0", **metrics}
    async with serve(server=server) as (url, _):
        assert await get(url, "/healthz", trusting("rsa")) == (200, "ok\n")
        status, page = await get(f"https://127.0.0.1:{unused_tcp_port}", "/metrics", trusting("ecdsa"))
        assert status == 200 and "coordinator_requests_in_flight" in page
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(url, "/healthz", trusting("ecdsa"))
        for plain in (url.replace("https", "http"), f"http://127.0.0.1:{unused_tcp_port}"):
            status, told = await get(plain, "/healthz", None)
            assert (status, "speaks HTTPS" in json.loads(told)["error"]["message"]) == (400, True)


async def test_a_body_in_plain_http_is_thrown_away_until_its_client_has_read_the_answer(serve, folder):
    server = {"secure_serving": True, "cert_path": folder("rsa"), "listen_addr": "127.0.0.1:0"}
    async with serve(server=server) as (url, _):
        reader, writer = await asyncio.open_connection(*url.removeprefix("https://").split(":"))
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9999999\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
        for _ in range(64):
            writer.write(bytes(2**16))
            await writer.drain()
        writer.write_eof()
        body = await asyncio.wait_for(reader.read(), HANG_S)
        writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == 400


async def test_a_certificate_that_cannot_be_used_stops_the_start_and_is_named(serve, folder):
    path = folder("rsa")
    (Path(path) / "tls.key").unlink()
    async with serve(server={"secure_serving": True, "cert_path": path}) as (url, lines):
        assert url is None
    (told,) = lines
    assert told.endswith(f"pd.json: server.cert_path: {path}/tls.key cannot be read: No such file or directory\n")


async def test_a_renewed_certificate_is_served_without_a_restart(fleet, folder, stack):
    """And a connection that is there keeps going: nobody is hung up for a new certificate."""
    tree = config_tree(fleet, "alone", {}, {"server": {"secure_serving": True, "cert_path": folder("rsa")}})
    app = build(Config.model_validate(tree))
    await stack.enter_async_context(app.running())
    certificate, none = app.certificates
    assert none is None
    await app.server.listen("127.0.0.1", 0, certificate.context)
    at = f"https://{app.server.addresses[0]}"
    url = f"{at}/healthz"
    old = trusting("rsa")
    async with aiohttp.ClientSession() as kept:
        for _ in range(2):
            async with kept.get(url, ssl=old) as answer:
                assert await answer.text() == "ok\n"
            folder("ecdsa")
            await app.watch.look()
    assert (await get(at, "/healthz", trusting("ecdsa")))[0] == 200


@pytest.fixture
async def secure(stack):
    """A worker behind https; ``secure.heard`` are the paths that it was asked for."""
    heard = []

    async def answer(request):
        heard.append(request.path)
        return web.json_response({"data": []} if request.method == "GET" else ANSWER)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(PAIRS / "rsa" / "tls.crt", PAIRS / "rsa" / "tls.key")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    return runner.addresses[0], heard


def pool(secure, **keys):
    (host, port), _ = secure
    return {"decode": {"endpoints": [f"https://{host}:{port}"], **keys}}


@pytest.mark.parametrize("keys", [{"ca_file": str(PAIRS / "rsa" / "tls.crt")}, {"insecure_skip_verify": True}])
async def test_a_worker_behind_https_is_asked_on_every_leg_and_probe(coordinator, fleet, secure, keys, caplog):
    at = await coordinator(fleet, "alone", pools=pool(secure, **keys))
    assert (await at.chat()).status == 200
    assert (await at.get("/v1/models")).status == 200
    assert {"/health", CHAT, "/v1/models"} <= set(secure[1])
    warned = "pools.decode: the certificates of its servers are not verified" in caplog.messages
    assert warned == ("insecure_skip_verify" in keys)


@pytest.mark.parametrize("keys", [{}, {"ca_file": str(PAIRS / "ecdsa" / "tls.crt")}])
async def test_a_worker_whose_certificate_is_not_trusted_is_never_asked(coordinator, fleet, secure, keys, eventually):
    """Neither by the system's authorities nor by others of our own: no byte of a request reaches it."""
    at = await coordinator(fleet, "alone", pools=pool(secure, **keys), ready=False)
    got = await at.chat()
    assert (got.status, got.error["type"]) == (503, "ServiceUnavailableError")

    async def told():
        return "cannot be reached" in (await at.get("/readyz")).raw.decode()

    await eventually(told)
    assert secure[1] == []


async def test_an_authority_file_that_is_not_there_stops_the_start(fleet, secure):
    tree = config_tree(fleet, "alone", {}, {"pools": pool(secure, ca_file="/nowhere/ca.crt")})
    with pytest.raises(ConfigError, match=r"pools\.decode\.ca_file: /nowhere/ca\.crt cannot be read"):
        build(Config.model_validate(tree))
