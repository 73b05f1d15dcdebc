"""`health`: whether a process of this server on this machine does its work; for the health checks of containers.

`web` (the default; also for `serve`) asks the front plane. `reconcile` asks the registry whether a reconciler leads.
It starts and changes nothing, and sends no key.
"""

from __future__ import annotations

import argparse
import http.client
import ssl
import sys
from typing import TYPE_CHECKING

from pydantic import ValidationError

from config.options import Options
from config.refusals import UnusableSettings, read_settings
from management.database_errors import with_advice

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "/health"
TIMEOUT_S = 5.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server that listens on every address is asked."""


class Unhealthy(Exception):
    """The process does not do its work; the text says why."""


def main(program: str, arguments: list[str]) -> int:
    """`health [web|reconcile] [--alive]`: the exit status is 0 if healthy, 1 if not, as Docker reads it."""
    parser = argparse.ArgumentParser(prog=f"{program} health", description=__doc__)
    parser.add_argument("process", nargs="?", choices=sorted(CHECKS), default="web")
    parser.add_argument(
        "--alive", action="store_true", help="Of `web`: an answer is enough, though no worker can take requests."
    )
    parsed = parser.parse_args(arguments)
    if parsed.alive and parsed.process != "web":
        parser.error(f"--alive is of web; {parsed.process} has no such state")
    try:
        print(CHECKS[parsed.process](Options(), parsed.alive))
    except ValidationError as error:
        print(f"the settings are invalid: {error.error_count()} errors; `doctor` shows them", file=sys.stderr)
        return 1
    except Unhealthy as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check_web(options: Options, alive: bool) -> str:
    """Ask the front plane. Raises Unhealthy."""
    address = f"{LOOPBACK.get(options.host, options.host)}:{options.front_port}"
    try:
        status = _status(options)
    except ssl.SSLError as error:
        if not options.tls_client_authorities:
            raise Unhealthy(f"{address}: {error}") from error
        return f"{address} answers; health is told to clients with a certificate alone"
    except (OSError, http.client.HTTPException) as error:
        raise Unhealthy(f"{address} does not answer: {error}") from error
    if status != 200 and not alive:
        raise Unhealthy(f"{address} answers {status}: no worker can take requests")
    return f"{address} answers {status}"


def _status(options: Options) -> int:
    """The status of the front plane's health route. Raises OSError or HTTPException."""
    host = LOOPBACK.get(options.host, options.host)
    if options.tls_certificate is None:
        connection = http.client.HTTPConnection(host, options.front_port, timeout=TIMEOUT_S)
    else:
        # This process asks its own machine, and sends nothing that another could use; the certificate names other hosts.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, options.front_port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", PATH)
        return connection.getresponse().status
    finally:
        connection.close()


def check_reconcile(options: Options, alive: bool) -> str:
    """Ask the registry who leads. Raises Unhealthy."""
    try:
        read_settings()
    except UnusableSettings as error:
        raise Unhealthy(str(error)) from error
    import django
    from django.db import Error

    django.setup(set_prefix=False)
    from management.leadership import current_leader

    try:
        leader = current_leader()
    except Error as error:
        raise Unhealthy(f"the registry cannot be read: {with_advice(error)}") from error
    if leader is None:
        raise Unhealthy("no reconciler leads")
    return f"{leader} leads"


CHECKS: dict[str, Callable[[Options, bool], str]] = {"web": check_web, "reconcile": check_reconcile}
