"""The command line: serve, check, explain, schema, demo.

Exit codes: 0 done, 1 the request or the run failed, 2 the configuration or the command line is wrong; as a shell has
them, 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator import registry
from coordinator.config import ConfigError, load
from coordinator.logs import LEVELS, log, set_up
from coordinator.version import version
from envelope.errors import ApiError
from envelope.formats import PATHS, Format
from envelope.json_codec import JSONDecodeError, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from coordinator.config import Config
    from coordinator.serve import Steering
    from coordinator.step import Step

FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141

# What Linux lets a process have unless its administrator has said otherwise (fs.nr_open).
_FILES = 1 << 20


class NoEvents:
    """Counters of a run that answers nobody."""

    def handover_sent(self, age_s: float) -> None:
        pass

    def handover_missing(self, reason: str, policy: str) -> None:
        pass

    def encode_skipped(self, reason: str) -> None:
        pass

    def encoding_missing(self, reason: str, policy: str) -> None:
        pass

    def prefill_skipped(self, reason: str) -> None:
        pass

    def prefill_failed_over(self, reason: str) -> None:
        pass

    def begun_again(self) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    try:
        code = _main(argv)
    except BrokenPipeError:
        # Whoever read the output has had enough of it. The rest, which Python flushes at exit, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    sys.exit(code)


def _main(argv: Sequence[str] | None) -> int:
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
        return code
    except ConfigError as error:
        return _wrong(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        print(end="", flush=True)  # a pipe that is closed is told of here


def _wrong(error: ConfigError) -> int:
    return _told(WRONG, error.problems)


def _told(code: int, problems: Iterable[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return code


def run(main_coroutine: Coroutine[Any, Any, int | None]) -> int:
    """Run a coroutine on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main_coroutine) or 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


def _serve(args: argparse.Namespace) -> int:
    config = _load(args)
    set_up(LEVELS[config.log_level], config.log_format)
    _allow_files()
    if config.server.huge_pages:
        _take_huge_pages()
    if config.server.workers == 1:
        from coordinator.serve import Alone

        return _told(*_served(config, args.config, Alone(args.config)))
    from coordinator.processes.member import Member
    from coordinator.processes.supervisor import Supervisor

    supervisor = Supervisor(config, args.config, lambda share, end: _served(share, args.config, Member(end)))
    try:
        return _told(*supervisor.run())
    except OSError as error:
        return _told(FAILED, [_port_refused(config, args.config, error)])


def _allow_files() -> None:
    """Raise the limit of open files to what this process may have: a stream is two of them.

    The limit that most shells and containers begin with, 1024, is for the sake of ``select``, which nothing here uses.
    Beyond it, new connections are closed without a word. Programs in Go do the same.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # macOS may refuse its own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _take_huge_pages() -> None:
    try:
        from coordinator.huge_pages import move_code

        log.info("the interpreter's code is in huge pages", extra={"fields": {"bytes": move_code()}})
    except (ImportError, RuntimeError) as error:  # Python was built without ctypes, or NoHugePages
        log.info("no huge pages for the interpreter's code", extra={"fields": {"reason": str(error)}})


def _served(config: Config, path: str, steering: Steering) -> tuple[int, list[str]]:
    """Serve in this process; return the exit code, and what is wrong in sentences."""
    from coordinator.serve import serve

    _spare_the_collector()
    try:
        return run(serve(config, path, steering)), []
    except OSError as error:
        return FAILED, [_port_refused(config, path, error)]
    except ConfigError as error:
        return WRONG, error.problems


def _spare_the_collector() -> None:
    """Let the garbage collector pass over what stays until the end, and run less often: requests leave it nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def _port_refused(config: Config, path: str, error: OSError) -> str:
    """Say of a port that it is taken, or not ours to bind."""
    told = error.strerror or str(error)
    key = "metrics_port" if f", {config.server.metrics_port})" in told else "listen_addr"
    return f"{path}: server.{key}: {told}"


def _check(args: argparse.Namespace) -> int:
    config = _load(args)
    steps = registry.build(config, NoEvents())
    print(f"{args.config}: ok")
    for api in Format:
        _print_plan(config, steps, api)
    return 0


def _print_plan(config: Config, steps: Sequence[Step], api: Format) -> None:
    from coordinator.planning import SERVED

    if api not in SERVED:
        return
    print(f"\nPOST {PATHS[api]}")
    for step in steps:
        row = step.plan(api)
        call = f"{row.format or ''} {row.path}" if row.path else "no call"
        roles = [*row.also, row.role] if row.role and row.path else []
        where = f"-> {' and '.join(_destination(config, steps, role) for role in roles)}" if roles else ""
        notes = f"({'; '.join(row.notes)})" if row.notes else ""
        print("  " + " ".join(part for part in (f"{row.step:19}", call, where, notes) if part))


def _destination(config: Config, steps: Sequence[Step], role: str) -> str:
    """Say where a role's legs go, as the file has it."""
    from coordinator.links import links
    from coordinator.routing.gateway import GatewayRouter
    from coordinator.security.credentials import Closed

    router = links(config, steps, Closed())[role].router
    workers = ", ".join(worker.url for worker in router.known())
    if isinstance(router, GatewayRouter):
        assert config.gateway is not None
        return f"{workers} with {config.gateway.profile_header}: {role}"
    pool = getattr(config.pools, role, None)
    if pool is not None and pool.header:
        return f"the worker named by the request header {pool.header}, if any"
    if pool is not None and pool.lookup is not None:
        return f"{pool.lookup} by {pool.policy}"
    return f"{workers} by {pool.policy}" if pool is not None and len(router.known()) > 1 else workers


def _explain(args: argparse.Namespace) -> int:
    from coordinator.explain import explain, guess_api
    from coordinator.links import discarded, links, routing_headers
    from coordinator.planning import open_renderers
    from coordinator.routing.pool import PoolRouter
    from coordinator.security.credentials import Closed

    config = _load(args)
    steps = registry.build(config, NoEvents())
    open_renderers(config, steps)
    body = _read_request(args.request)
    api = Format(args.api) if args.api else guess_api(body)
    headers = tuple(_header(text) for text in args.header)
    routing, discard = routing_headers(config), discarded(config)
    roles = links(config, steps, Closed())
    for role, link in roles.items():
        if isinstance(link.router, PoolRouter) and not link.router.known():
            link.router.members.replace([f"http://<{role} worker>"])  # who it is shows only when it is looked up
    try:
        legs = asyncio.run(explain(steps, roles, NoEvents(), api, body, headers, routing, discard))
    except ApiError as error:
        print(json.dumps({"error": error.body("")}, indent=2), file=sys.stderr)
        return FAILED
    print(json.dumps([leg.as_json() for leg in legs], indent=2, ensure_ascii=False))
    return 0


def _schema(args: argparse.Namespace) -> int:
    print(json.dumps(registry.json_schema(), indent=2))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from coordinator.demo import demo

    set_up(LEVELS["info"], "human")
    return run(demo(args.port, args.ask, args.stream, args.image))


def _load(args: argparse.Namespace) -> Config:
    return load(args.config, os.environ)


def _read_request(path: str) -> Any:
    """Read a client's body as the server does: with every digit, and nothing that JSON does not have."""
    try:
        return loads(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes())
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except JSONDecodeError as error:
        raise ConfigError([f"{path}: not JSON: {error}"]) from None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise ConfigError([f"--header {text!r}: write it as 'name: value'"])
    return name.strip(), value.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coordinator", description="Drive OpenAI requests through split vLLM fleets.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, help_text: str, run_command: Any, *, config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.set_defaults(run=run_command)
        if config:
            sub.add_argument("--config", required=True, metavar="FILE", help="the YAML file")
        return sub

    command("serve", "run the coordinator", _serve)
    command("check", "validate a file and print what each step does for each API", _check)
    sub = command("explain", "print the legs that a request would make, without sending anything", _explain)
    sub.add_argument("--request", required=True, metavar="FILE", help="the client's JSON body; - is standard input")
    sub.add_argument("--api", choices=[str(api) for api in Format], help="the client's API; guessed from the body")
    sub.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="a client header")
    command("schema", "print the JSON Schema of the file, for editors", _schema, config=False)
    sub = command("demo", "run simulated workers with the coordinator in front", _demo, config=False)
    sub.add_argument("--port", type=int, default=8080, help="port to listen on; 0 is a free one (default 8080)")
    sub.add_argument("--ask", metavar="TEXT", help="ask this, print the answer, and stop")
    sub.add_argument("--image", metavar="FILE", help="with --ask: a picture to ask about")
    sub.add_argument("--stream", action="store_true", help="with --ask: print the answer as it comes")
    return parser
