"""Fault points: what a text of faults means, when each happens, and who refuses to start with them."""

from __future__ import annotations

import errno
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

import config.options
from config.options import Options
from engine import faults
from engine.faults import Fault, FaultError, InjectedFault, Mode
from tests.conftest import ROOT


@pytest.fixture
def arm():
    """Arm faults, which no later test meets."""
    yield lambda text: faults.arm({faults.VARIABLE: text, faults.SWITCH: "1"})
    faults.arm({})


@pytest.mark.parametrize(("text", "meant"), [
    ("", []),
    ("step:raise", [Fault("step", Mode.RAISE)]),
    ("step:raise::1", [Fault("step", Mode.RAISE, "", 1, 1)]),
    ("step:sleep:0.5:3-", [Fault("step", Mode.SLEEP, "0.5", 3, None)]),
    ("step:exit:9:2-4", [Fault("step", Mode.EXIT, "9", 2, 4)]),
    ("step:exit:9:@1234", [Fault("step", Mode.EXIT, "9", among="1234")]),
    ("step:exit:9:2-3@1234", [Fault("step", Mode.EXIT, "9", 2, 3, "1234")]),
    ("adapter.copy:errno:ENOSPC, frame:cut:5:@Outputs",
     [Fault("adapter.copy", Mode.ERRNO, "ENOSPC"), Fault("frame", Mode.CUT, "5", among="Outputs")]),
])  # fmt: skip
def test_what_a_text_means(text, meant):
    assert faults.parse(text) == meant


@pytest.mark.parametrize(("text", "told"), [
    ("stop:raise", f"'stop' is no fault point; known: {', '.join(faults.POINTS)}"),
    ("step:burn", "step has no mode 'burn'; known: exit, raise, sleep"),
    ("loop:raise", "known: exit, sleep"),
    ("step:cut:1", "step has no mode 'cut'"),
    ("step:raise:x", "it takes none"),
    ("step:sleep:", "seconds from 0 to 86400"),
    ("step:sleep:-1", "seconds"),
    ("step:sleep:nan", "seconds"),
    ("step:exit:256", "a status from 0 to 255"),
    ("adapter.copy:errno:EWHATEVER", "the name of an error, such as ENOSPC"),
    ("frame:cut:x", "bytes from 0 to 1000000"),
    ("step:raise::0", "N, N- or N-M of its visits, @value"),
    ("step:raise::@", "@value"),
    ("step:raise::1@", "@value"),
    ("step:raise::3-x", "@value"),
    ("step:raise::1:1", "point:mode:argument[:when] is expected"),
])  # fmt: skip
def test_what_is_none_is_refused_with_what_is_known(text, told):
    with pytest.raises(FaultError, match=re.escape(told)):
        faults.parse(text)
    with pytest.raises(ValidationError, match=re.escape(told)):
        Options(faults=text)


def visits(count: int) -> list[int]:
    """The visits, from 1, at which something is raised."""
    raised = []
    for number in range(1, count + 1):
        try:
            faults.hit("step")
        except InjectedFault:
            raised.append(number)
    return raised


@pytest.mark.parametrize(("when", "expected"), [
    ("", [1, 2, 3, 4]), (":2", [2]), (":3-", [3, 4]), (":2-3", [2, 3]), (":@7", []),
])  # fmt: skip
def test_when_it_happens(arm, when, expected):
    arm(f"step:raise:{when}")
    assert visits(4) == expected


def test_what_it_concerns(arm):
    arm("step:raise::@7")
    faults.hit("step", lambda: {"1", "2"})
    faults.hit("start")
    with pytest.raises(InjectedFault):
        faults.hit("step", lambda: {"1", "7"})


def test_each_mode(arm):
    arm("adapter.copy:errno:ENOSPC,frame:cut:3:@Outputs,frame:sleep:0")
    with pytest.raises(OSError, match="No space left") as full:
        faults.hit("adapter.copy")
    assert full.value.errno == errno.ENOSPC
    faults.hit("frame", lambda: ["Outputs"])
    assert faults.cut("frame", b"12345", lambda: ["Heartbeat"]) == b"12345"
    assert faults.cut("frame", b"12345", lambda: ["Outputs"]) == b"123"
    program = "from engine import faults; faults.arm({'DRAGOMAN_FAULTS': 'step:exit:7', 'DRAGOMAN_ENABLE_FAULTS': '1'}); faults.hit('step')"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 7


@pytest.mark.parametrize("switch", [None, "0", "false", ""])
def test_nothing_is_armed_without_the_switch(switch):
    faults.arm({faults.VARIABLE: "step:raise", **({} if switch is None else {faults.SWITCH: switch})})
    assert not faults.armed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_no_release_has_them(host, monkeypatch, tmp_path):
    with pytest.raises(ValidationError, match=f"enable_faults is refused: {host} can be reached"):
        Options(enable_faults=True, host=host)
    with pytest.raises(ValueError, match="can be reached"):
        Options(enable_faults=True).check_faults(["127.0.0.1", host])
    assert Options(faults="step:raise", host=host).enable_faults is False
    monkeypatch.setattr(config.options, "PROJECT", tmp_path / "pyproject.toml")
    with pytest.raises(ValidationError, match="refused in an installed package"):
        Options(enable_faults=True)


@pytest.mark.parametrize("command", ["serve", "web", "reconcile"])
@pytest.mark.parametrize(("settings", "told"), [
    ({"DRAGOMAN_HOST": "0.0.0.0", "DRAGOMAN_ALLOW_PLAIN_TEXT": "true"}, "enable_faults is refused"),
    ({"DRAGOMAN_FAULTS": "nowhere:raise"}, "'nowhere' is no fault point; known: start, step"),
])  # fmt: skip
def test_a_server_does_not_start_with_them(command, settings, told, tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "DRAGOMAN_DATA_DIR": str(tmp_path), "DRAGOMAN_FAULTS": "step:raise",
                   "DRAGOMAN_ENABLE_FAULTS": "1", **settings}  # fmt: skip
    line = [sys.executable, "-W", "ignore", "manage.py", command]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert told in done.stderr
    assert not (tmp_path / "dragoman.sqlite3").exists()
