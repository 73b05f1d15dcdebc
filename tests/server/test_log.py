"""A log that nobody reads costs log lines and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import httpx
import pytest

from engine.process.log_writer import LogWriter
from tests.conftest import ROOT
from tests.live import LiveServer, heed_interrupts, wait_until

LINES = 6000
"""Of some 200 bytes each: more than a pipe and the writer's buffer hold."""


def test_a_reader_that_stands_still_holds_up_nobody_and_learns_what_was_lost():
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream, os.fdopen(read_end, "rb") as reader:
        writer = LogWriter(stream, max_characters=10_000)
        for number in range(LINES):
            writer.write(f"{number} {'x' * 200}\n")
        assert 0 < writer.dropped < LINES
        text = b""
        while sum(map(int, re.findall(rb"(\d+) log lines were dropped", text))) < writer.dropped:
            text += reader.read1(65536)
        numbers = [int(line.split()[0]) for line in text.splitlines() if b"dropped" not in line]
        assert numbers == sorted(numbers)
        assert len(numbers) + writer.dropped == LINES
        assert numbers[:40] == list(range(40)), "what had room came whole and in order"
        writer.write("again\n")
        assert reader.read1(65536) == b"again\n"


def test_a_writer_whose_reader_has_gone_goes_on():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        writer = LogWriter(stream)
        for _ in range(100):
            writer.write("x" * 1000)
        writer.drain(timeout_s=30)
        assert not writer.dropped


def test_a_server_answers_while_its_log_is_a_pipe_that_nobody_reads(tmp_path):
    live = LiveServer(tmp_path / "var")
    live.process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "manage.py", "serve"],
        cwd=ROOT, env=live.settings(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed_interrupts,
    )  # fmt: skip
    try:
        wait_until(live.healthy, 90)
        body = {"prompt": "Hi", "max_tokens": 1}
        with httpx.Client(timeout=60, headers={"x-request-id": "i" * 128}) as client:  # long lines
            for number in range(20_000):
                assert client.post(f"{live.url}/v1/completions", json=body).status_code == 200
                if number % 100 == 99 and live.metric("dragoman_log_lines_dropped_total") > 0:
                    break
            else:
                pytest.fail("the log never became full")
            assert client.post(f"{live.url}/v1/completions", json=body).status_code == 200
            assert client.get(f"{live.url}/health").status_code == 200
            assert client.get(f"{live.admin_url}/admin/login/").status_code == 200
        assert live.stop() == 0
    finally:
        if live.process.poll() is None:
            live.process.kill()
        live.process.stdout.close()
