"""Measures tokens per second of this server and its peers against tokens per second of each user, and a few points more.

    python -m benchmarks.curve [--shapes SHAPE ...] [--peers vllm openvino llama.cpp] [--streams 1 2 4 8 16 32]
                               [--points long prefix chats open] [--rounds 3] [--out DIRECTORY]

It installs the peers and makes the models in a cache folder (once), starts one server of each kind, and lets them take turns.
Every run is appended to runs.jsonl in the output folder at once. The same command goes on where the last one ended: it
measures what is missing, was disturbed or failed. `benchmarks.report` and `benchmarks.plot` read the file.

A run is disturbed if programs that are neither the server nor the client used more than `--max-other` cores in the mean. It
is repeated up to `--repeats` times, after a wait for the machine to become quiet.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environments import CommandError, cache_folder
from benchmarks.loads import POINTS, Case, Words, cases
from benchmarks.machine import commit, machine, native_dtype
from benchmarks.peers import OURS, PEERS
from benchmarks.peers.base import Peer, Setup
from benchmarks.records import Context, Failed, Results
from benchmarks.servers import OwnServer, RunningServer, Server, running_server
from benchmarks.shapes import RATES, model
from benchmarks.turns import Rules, Turns, now
from loadtests.server import free_port


class Measurement:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._results = Results(options.out / "runs.jsonl")
        self._machine = machine()
        self._dtype = native_dtype(self._machine.flags) if options.dtype == "auto" else options.dtype
        self._peers: list[Peer] = [OURS, *(PEERS[name] for name in options.peers)]
        self._installed: dict[str, dict[str, str] | CommandError] = {}

    def run(self) -> None:
        """All shapes, one after another."""
        for shape in self._options.shapes:
            threads = self._options.threads or self._machine.cores
            context = Context(self._machine, commit(), self._dtype, threads, shape, self._options.quantization)
            try:
                folder = model(shape, self._dtype, self._options.cache, self._log(shape, "model"))
            except CommandError as error:
                self._fail(context, "", "model", error)
                continue
            rate = self._options.rate or RATES[shape]
            work = cases(self._options.streams, self._options.points, rate, self._options.prompt, self._options.output)
            with tempfile.TemporaryDirectory(prefix="dragoman-curve-") as temporary:
                self._shape(context, folder, work, Path(temporary))

    def _shape(self, context: Context, folder: Path, work: list[Case], temporary: Path) -> None:
        servers: dict[str, tuple[Server, dict[str, str]]] = {}
        for peer in self._peers:
            try:
                servers[peer.name] = self._prepare(peer, context, folder, temporary / peer.name)
            except (CommandError, OSError) as error:
                self._fail(context, peer.name, "installation", error)
        servers.update({server.name: (server, {}) for server in self._options.server})
        if not servers:
            return
        options = self._options
        rules = Rules(options.max_other, options.repeats, options.quiet_timeout, options.run_timeout)
        words = Words(folder / "tokenizer.json")
        turns = Turns(context, servers, words, self._results, rules, options.seed)
        try:
            turns.run(work, options.rounds)
        finally:
            turns.stop()

    def _prepare(self, peer: Peer, context: Context, folder: Path, temporary: Path) -> tuple[OwnServer, dict[str, str]]:
        """Install it and convert the model; nothing is started yet. Raises CommandError."""
        log = self._log(context.shape, peer.name)
        if peer.name not in self._installed:
            print(f"{peer.name}: installing what is missing ({log})", flush=True)
            try:
                self._installed[peer.name] = peer.install(self._options.cache, log)
            except CommandError as error:
                self._installed[peer.name] = error
        versions = self._installed[peer.name]
        if isinstance(versions, CommandError):
            raise versions
        temporary.mkdir()
        setup = Setup(
            self._options.cache, temporary, folder, context.dtype, context.threads, free_port(), context.quantization
        )
        launch = peer.launch(setup, log)
        return OwnServer(peer.name, launch, setup.port, log, self._options.start_timeout), versions

    def _log(self, shape: str, name: str) -> Path:
        return Path(self._options.out, "logs", f"{shape}-{name}.log")

    def _fail(self, context: Context, server: str, stage: str, error: CommandError | OSError) -> None:
        print(f"{context.shape} {server} {stage}: {error}", flush=True)
        self._results.add(Failed(context, server, now(), stage, str(error)))


def arguments() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(RATES), default=["smollm2-135m", "qwen2.5-0.5b"])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["vllm", "openvino", "llama.cpp"])
    parser.add_argument(
        "--server", nargs="+", type=_server, default=[], metavar="NAME=URL[#MODEL]",
        help="Servers that run on this machine with the same model, to measure as well.",
    )  # fmt: skip
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--points", nargs="*", choices=POINTS, default=["long", "prefix", "chats", "open"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("var/curve"))
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="Where peers and models are kept.")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none", help="Of every server's weights.")
    parser.add_argument("--threads", type=int, default=0, help="Of each server; 0 is one per usable CPU.")
    parser.add_argument("--prompt", type=int, default=128, help="Prompt tokens of the curve's requests.")
    parser.add_argument("--output", type=int, default=128, help="Their output tokens.")
    parser.add_argument("--rate", type=float, help="Requests a second of the open loop.")
    parser.add_argument("--max-other", type=float, default=0.2, help="Cores that others may use.")
    parser.add_argument("--repeats", type=int, default=2, help="Of a disturbed run.")
    parser.add_argument(
        "--quiet-timeout", type=float, default=60, help="Seconds to wait for a quiet machine before that."
    )
    parser.add_argument("--run-timeout", type=float, default=1200, help="Seconds.")
    parser.add_argument("--start-timeout", type=float, default=600, help="Seconds.")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="Of prompts; servers cache those of another time."
    )
    return parser


def _server(argument: str) -> RunningServer:
    try:
        return running_server(argument)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    """Measure; servers are stopped however it ends."""
    parser = arguments()
    options = parser.parse_args()
    if not options.streams and not options.points:
        parser.error("nothing to measure: --streams and --points are empty")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    Measurement(options).run()
    print(options.out / "runs.jsonl")


if __name__ == "__main__":
    main()
