"""`python -m loadtests`: run shapes of load against a server, compare what they measure with targets, and write a report.

Without --host it starts a server with the demo model on free ports for each shape, and stops it afterwards. The exit status is
0 if all targets are met, 1 if one is missed, and 2 if the run cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from loadtests.html import write_report
from loadtests.machine import ROOT, commit
from loadtests.plan import PROFILES
from loadtests.reachable import UnreachableError, check_metrics, check_server
from loadtests.records import Record, read_record
from loadtests.server import RunningServer, served
from loadtests.settings import ADAPTERS, API_KEY, MODEL, LocalServer, RunSettings
from loadtests.shapes import SHAPES, SUITE
from loadtests.sizes import sized
from loadtests.targets import TargetsError, load_targets

PLANES = {
    "GRPC_PORT": "LOAD_TRITON_GRPC",
    "TORCHSERVE_GRPC_INFERENCE_PORT": "LOAD_TORCHSERVE_GRPC",
    "MINDIE_PORT": "LOAD_MINDIE",
    "DJL_PORT": "LOAD_DJL",
}
STOP_TIMEOUT_S = 130


def main() -> int:
    """Run the shapes one after another; returns the exit status."""
    options = _options()
    folder: Path = options.out or ROOT / "var" / "loadtests" / f"{time.strftime('%Y%m%d-%H%M%S')}-{commit()}"
    try:
        load_targets(options.targets, options.profile, options.shapes)
        if options.host:
            _check_host(options)
        folder.mkdir(parents=True, exist_ok=True)
    except (TargetsError, UnreachableError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    records = []
    for name in options.shapes:
        run = RunSettings(
            shape=name,
            profile=options.profile,
            targets=str(options.targets.resolve()),
            out=str((folder / f"{name}.json").resolve()),
            seconds=options.seconds,
            users=options.users,
        )
        Path(run.out).unlink(missing_ok=True)  # of an earlier run in the same folder
        status = _run(run, options)
        if status not in (0, 1) or not Path(run.out).exists():
            print(f"{name}: the run was not made", file=sys.stderr)
            return 2
        records.append(read_record(Path(run.out)))
    report = folder / "report.html"
    write_report(records, report)
    print(f"\n{report}")
    return _summary(records)


def _check_host(options: argparse.Namespace) -> None:
    """Raises UnreachableError if the running server cannot be measured."""
    local = [name for name in options.shapes if SHAPES[name].local]
    if local and not options.pid:
        raise UnreachableError(f"{', '.join(local)}: needs --pid with --host, to watch the server")
    if options.pid and not psutil.pid_exists(options.pid):
        raise UnreachableError(f"--pid: there is no process {options.pid} on this machine")
    if "burst" in options.shapes and not options.start_seconds:
        raise UnreachableError(
            "burst: needs --start-seconds with --host, to compare a deployment that wakes with the start"
        )
    adapters = ADAPTERS if any(SHAPES[name].adapters for name in options.shapes) else ()
    check_server(options.host, MODEL, adapters, API_KEY)
    if any(SHAPES[name].watched for name in options.shapes):
        check_metrics(options.host, API_KEY)


def _summary(records: list[Record]) -> int:
    missed = [
        f"{record.shape}: {verdict.text()}" for record in records for verdict in record.verdicts if not verdict.met
    ]
    for line in missed:
        print(line)
    print(f"{len(missed)} of {sum(len(record.verdicts) for record in records)} targets missed")
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), metavar="SHAPE",
                        help=f"Of {', '.join(SHAPES)}; without it all but soak, and with --host those that need no --pid.")  # fmt: skip
    parser.add_argument(
        "--profile", choices=list(PROFILES), default="cpu-small", help="How much load, and which targets."
    )
    parser.add_argument("--host", help="The front plane of a running server, e.g. http://127.0.0.1:8000.")
    parser.add_argument("--pid", type=int, default=0, help="Its process id, if it runs on this machine.")
    parser.add_argument(
        "--data-dir", default=os.environ.get("DRAGOMAN_DATA_DIR", ""), help="Its data folder, for burst."
    )
    parser.add_argument("--start-seconds", type=_seconds, default=0.0, help="What its start takes, for burst.")
    parser.add_argument("--users", type=_positive, default=0, help="The most users, instead of the profile's.")
    parser.add_argument("--seconds", type=_seconds, default=0.0, help="Of a stage, and of a whole soak.")
    parser.add_argument(
        "--processes", type=_positive, default=0, help="Locust processes: a master and so many workers."
    )
    parser.add_argument("--targets", type=Path, default=ROOT / "loadtests" / "targets.toml")
    parser.add_argument(
        "--out", type=Path, help="A folder for the report and the JSON files; below var/loadtests without it."
    )
    parser.add_argument("locust", nargs="*", help="After --: further options of Locust, such as --master.")
    options = parser.parse_args()
    if options.shapes is None:
        options.shapes = [name for name in SUITE if options.pid or not options.host or not SHAPES[name].local]
    if not options.shapes:
        parser.error("argument --shapes: name at least one")
    if "--master" in options.locust and len(options.shapes) != 1:
        parser.error("argument --shapes: name one with --master, because Locust's workers leave after it")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 100_000:
        raise argparse.ArgumentTypeError("must be from 1 to 100000")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be from 1 to 86400")
    return value


def _run(run: RunSettings, options: argparse.Namespace) -> int:
    """One shape; Locust's exit status."""
    settings = SHAPES[run.shape].plan(sized(PROFILES[run.profile], run)).settings
    with _server(options, settings) as server:
        if server is not None:
            host = server.url
            local: LocalServer | None = LocalServer(server.pid, str(server.data_dir), server.start_s)
            addresses = {
                variable: f"{'http://' if name in ('MINDIE_PORT', 'DJL_PORT') else ''}127.0.0.1:{server.ports[name]}"
                for name, variable in PLANES.items()
            }
        else:
            host, addresses = options.host, {}
            local = LocalServer(options.pid, options.data_dir, options.start_seconds) if options.pid else None
        run = msgspec.structs.replace(run, local=local)
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), "--headless",
                   "--only-summary", "--loglevel", "WARNING", "-H", host, "--stop-timeout", str(STOP_TIMEOUT_S)]  # fmt: skip
        if options.processes:
            command += ["--processes", str(options.processes)]
        environment = {
            **os.environ,
            **addresses,
            "PYTHONPATH": str(ROOT),
            "LOAD_RUN": msgspec.json.encode(run).decode(),
        }
        return subprocess.run([*command, *options.locust], cwd=ROOT, env=environment, check=False).returncode


@contextlib.contextmanager
def _server(options: argparse.Namespace, settings: dict[str, str]) -> Iterator[RunningServer | None]:
    if options.host:
        yield None
    else:
        with served(settings, (*PLANES, "MINDIE_MANAGEMENT_PORT", "MINDIE_METRICS_PORT")) as server:
            yield server


if __name__ == "__main__":
    sys.exit(main())
