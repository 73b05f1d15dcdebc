"""One key file for all processes that serve from a folder: who writes it, reads it again, and removes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import structlog

from inference.dialects.torchserve.key_file import FILE, KINDS, KeyFile
from tests.conftest import ROOT

PROCESS = """
import sys
from pathlib import Path
from inference.dialects.torchserve.key_file import KeyFile
KeyFile(Path(sys.argv[1]), 60).create()
print("ready", flush=True)
sys.stdin.read()
"""


def read(folder):
    return json.loads((folder / FILE).read_text())


def opened(keys, folder):
    """The kinds of the file's keys that these keys open."""
    return [kind for kind, entry in read(folder).items() if keys.opens(kind, f"Bearer {entry['key']}")]


@pytest.fixture
def make(tmp_path):
    made = []

    def one(**options):
        made.append(KeyFile(tmp_path, 3600, **options))
        made[-1].create()
        return made[-1]

    yield one
    for each in made:
        each.remove()


@pytest.fixture
def other(tmp_path):
    """A process that uses the keys."""
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert any(line == "ready\n" for line in process.stdout)
        yield process
        process.kill()


def test_a_later_process_takes_the_keys_that_are_there(make, tmp_path):
    first = make()
    before = read(tmp_path)
    second = make()
    assert read(tmp_path) == before
    assert opened(first, tmp_path) == opened(second, tmp_path) == list(KINDS)


def test_all_see_a_key_that_one_replaces(make, tmp_path):
    first, second = make(), make()
    for one, another in ((first, second), (second, first)):
        for kind in ("management", "inference"):
            old = f"Bearer {read(tmp_path)[kind]['key']}"
            assert another.opens(kind, old)
            assert one.replace(kind) == read(tmp_path)[kind]
            assert not another.opens(kind, old)
            assert opened(another, tmp_path) == opened(one, tmp_path) == list(KINDS)


def test_a_key_expires_for_all_at_once(make, tmp_path):
    now = [1_000_000.0]
    first = make(clock=lambda: now[0])
    now[0] += 1800
    second = make(clock=lambda: now[0])
    assert opened(second, tmp_path) == list(KINDS)
    now[0] += 1800
    assert opened(first, tmp_path) == opened(second, tmp_path) == ["API"]


def test_keys_that_are_replaced_at_once_are_all_in_the_file(make, tmp_path):
    processes = [make() for _ in range(4)]
    told: dict[str, list[str]] = {"management": [], "inference": []}

    def replace(keys, kind):
        told[kind] += [keys.replace(kind)["key"] for _ in range(10)]

    threads = [threading.Thread(target=replace, args=(keys, kind)) for keys in processes for kind in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(read(tmp_path)[kind]["key"] in keys for kind, keys in told.items())
    assert len(set(told["management"] + told["inference"])) == 80
    assert all(opened(keys, tmp_path) == list(KINDS) for keys in processes)


def test_the_last_one_removes_the_file(make, tmp_path, other):
    before = read(tmp_path)
    first, second = make(), make()
    assert read(tmp_path) == before
    first.remove()
    assert opened(second, tmp_path) == list(KINDS)
    other.stdin.close()
    assert other.wait(60) == 0
    assert opened(second, tmp_path) == list(KINDS)
    second.remove()
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_removes_its_file(tmp_path, other):
    assert (tmp_path / FILE).exists()
    other.stdin.close()
    assert other.wait(60) == 0
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_opens_nothing(make, tmp_path, other):
    other.kill()
    other.wait(60)
    left = read(tmp_path)
    keys = make()
    assert not any(keys.opens(kind, f"Bearer {entry['key']}") for kind, entry in left.items())
    keys.remove()
    assert not list(tmp_path.iterdir())


def test_a_removed_file_opens_the_same_until_a_key_is_replaced(make, tmp_path):
    first, second = make(), make()
    text = read(tmp_path)
    (tmp_path / FILE).unlink()
    assert all(each.opens(kind, f"Bearer {text[kind]['key']}") for each in (first, second) for kind in KINDS)
    first.replace("inference")
    assert opened(second, tmp_path) == list(KINDS)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"API": {"key": "short"}}', "[" * 100_000, "\xff", "{}" + " " * 70_000]
)
def test_a_file_that_is_none_changes_nothing_and_is_not_logged(make, tmp_path, text):
    keys = make()
    before = read(tmp_path)
    (tmp_path / FILE).write_text(text, "latin-1")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert all(keys.opens(kind, f"Bearer {entry['key']}") for kind, entry in before.items())
    assert [line["event"] for line in logs] == ["key file cannot be used"]
    make()  # writes it anew
    assert opened(keys, tmp_path) == list(KINDS)


def test_a_file_that_others_can_write_or_a_link_is_not_read(make, tmp_path, tmp_path_factory):
    keys = make()
    before = read(tmp_path)
    forged = {**before, "API": {"key": "x" * 32}}
    elsewhere = tmp_path_factory.mktemp("elsewhere") / FILE
    elsewhere.write_text(json.dumps(forged))
    elsewhere.chmod(0o600)
    (tmp_path / FILE).unlink()
    os.symlink(elsewhere, tmp_path / FILE)
    assert not keys.opens("API", f"Bearer {'x' * 32}")
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).write_text(json.dumps(forged))
    (tmp_path / FILE).chmod(0o644)
    assert not keys.opens("API", f"Bearer {'x' * 32}")
    assert keys.opens("API", f"Bearer {before['API']['key']}")


def test_no_key_is_logged(make, tmp_path):
    with structlog.testing.capture_logs() as logs:
        first, second = make(), make()
        first.replace("inference")
        second.opens("inference", "Bearer x")
    assert logs
    assert not any(entry["key"] in str(logs) for entry in read(tmp_path).values())
