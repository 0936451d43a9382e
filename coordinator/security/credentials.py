"""Opens the keys and certificates that the configuration names, and renews them while we run.

``check`` and ``explain`` use ``Closed``, which opens none: they run where the keys need not be, and print.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from coordinator.logs import log
from coordinator.security.keys import Keys
from coordinator.security.secret import HIDDEN
from coordinator.security.tls import Certificate, client_context
from coordinator.security.watch import Watch
from coordinator.settings.problems import ConfigError, show_path

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from coordinator.config import Server
    from coordinator.settings.outbound import Outbound
    from coordinator.settings.problems import Path, Sources

T = TypeVar("T")

LegHeaders = list[tuple[str, str]]
"""What every leg of one role carries; the key, which comes first, is changed in place when it is renewed."""


class Credentials:
    """
    Args:
        sources: for sentences about what cannot be opened; ``check`` raises them all at once.
    """

    def __init__(self, environ: Mapping[str, str], sources: Sources) -> None:
        self.watch = Watch()
        self._environ = environ
        self._sources = sources
        self._problems: list[str] = []

    def check(self) -> None:
        """
        Raises:
            ConfigError: something could not be opened.
        """
        if self._problems:
            raise ConfigError(list(dict.fromkeys(self._problems)))  # a gateway is asked for by each role

    def headers(self, of: Outbound, at: Path, *also: tuple[str, str]) -> LegHeaders:
        """Return what every leg to a role's servers carries: our key, and ``also``."""
        secret = of.api_key
        if secret is None:
            return list(also)
        key = self._try((*at, "api_key"), lambda: secret.read(self._environ))
        found = [_bearer(key or ""), *also]
        if secret.path is not None:
            self.watch.add([secret.path], lambda: found.__setitem__(0, _bearer(secret.read(self._environ))))
        return found

    def verification(self, of: Outbound, at: Path) -> ssl.SSLContext | None:
        """Return how a role's servers are verified; None is by the system's authorities."""
        if of.insecure_skip_verify:
            log.warning("%s: the certificates of its servers are not verified", show_path(at))
        return self._try((*at, "ca_file"), lambda: client_context(of.ca_file, verify=not of.insecure_skip_verify))

    def client_keys(self, server: Server) -> Keys | None:
        """Return the keys of which clients must have one; None lets everybody in."""
        if not server.checks_keys:
            return None
        read = [
            self._try(("server", "api_keys", index), partial(secret.read, self._environ))
            for index, secret in enumerate(server.api_keys)
        ]
        written, file = [key for key in read if key is not None], server.api_keys_file or None
        if file is None:
            return Keys(written, None) if written else None  # without one that could be read, ``check`` raises
        keys = self._try(("server", "api_keys_file"), lambda: Keys(written, file))
        if keys is not None:
            self.watch.add([file], keys.renew)
        return keys

    def certificate(self, server: Server, key: str, watch: Watch) -> Certificate | None:
        """Return the certificate of the folder that a key names, which is watched from here on; None for no name."""
        folder: str = getattr(server, key)
        if not folder:
            return None
        versions = server.tls_min_version, server.tls_cipher_suites
        found = self._try(("server", key), lambda: Certificate(folder, *versions))
        if found is not None:
            watch.add(found.files, found.read)
        return found

    def _try(self, at: Path, opened: Callable[[], T]) -> T | None:
        try:
            return opened()
        except ValueError as error:
            self._problems.append(self._sources.problem(at, str(error)))
            return None


class Closed:
    """Stands for the keys of roles, and reads none."""

    def headers(self, of: Outbound, at: Path, *also: tuple[str, str]) -> LegHeaders:
        return list(also) if of.api_key is None else [_bearer(HIDDEN), *also]

    def verification(self, of: Outbound, at: Path) -> ssl.SSLContext | None:
        return None


def _bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")
