"""The folder of KV block files: what is refused, what goes first, and what several workers and crashes do to it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from hashlib import blake2b

import pytest

from engine import faults
from engine.offload import disk
from engine.offload.block_file import HEADER_BYTES, PART, DamagedFile, read_block, write_block
from engine.offload.blocks import HostRows
from engine.offload.disk import DiskTier, Staged
from engine.offload.folder import ABANDONED_S, BlockFolder, prepare_folder
from tests.conftest import ROOT
from tests.waiting import wait_until

MODEL, OTHER_MODEL = bytes(16), bytes(range(16))
SIZE = 1000
FILE = HEADER_BYTES + SIZE


def digest(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


def block(number: int) -> memoryview:
    return memoryview((f"{number} " * SIZE).encode()[:SIZE])


def folder(path, limit=1 << 20, model=MODEL) -> BlockFolder:
    prepare_folder(path)
    made = BlockFolder(path, model, limit, SIZE)
    made.scan()
    return made


def fill(made: BlockFolder, numbers) -> None:
    for number in numbers:
        made.write(digest(number), block(number))


def held(made: BlockFolder, numbers) -> list[int]:
    return [number for number in numbers if digest(number) in made]


def age(made: BlockFolder, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(made._path(digest(number)), (then, then))


def bytes_in(path) -> int:
    return sum(file.stat().st_size for file in path.glob("*/*/*"))


def change(path, at: int, to: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[at] = data[at] ^ 1 if to is None else to
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": lambda path: change(path, HEADER_BYTES + 100),
    "zeros": lambda path: path.write_bytes(bytes(FILE)),
    "another format": lambda path: change(path, 0),
    "another version": lambda path: change(path, 8, 2),
    "another checksum": lambda path: change(path, 12),
    "another model": lambda path: write_block(path, OTHER_MODEL, digest(1), block(1)),
    "another prefix": lambda path: write_block(path, MODEL, digest(2), block(1)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_removed_and_not_served(damage, tmp_path):
    made = folder(tmp_path / "kv")
    fill(made, [1])
    assert made.read(digest(1)) == block(1)
    path = made._path(digest(1))
    damage(path)
    assert made.read(digest(1)) is None
    assert (made.damaged, path.exists(), digest(1) in made, made.total_bytes) == (1, False, False, 0)


def test_what_is_no_file_is_not_opened(tmp_path):
    made = folder(tmp_path / "kv")
    fill(made, [1, 2, 3])
    paths = [made._path(digest(number)) for number in (1, 2, 3)]
    paths[0].rename(tmp_path / "elsewhere")
    paths[0].symlink_to(tmp_path / "elsewhere")
    paths[1].unlink()
    os.mkfifo(paths[1])
    paths[2].unlink()
    paths[2].mkdir()
    assert [made.read(digest(number)) for number in (1, 2, 3)] == [None] * 3
    assert (tmp_path / "elsewhere").exists()
    again = folder(tmp_path / "kv")
    assert again.total_bytes == 0


def test_the_least_recently_used_goes_first(tmp_path):
    made = folder(tmp_path / "kv", limit=4 * FILE)
    fill(made, range(4))
    assert made.read(digest(0)) is not None
    made.touch([digest(1)])
    fill(made, [4, 5])
    assert held(made, range(6)) == [0, 1, 4, 5]
    assert (made.evictions, bytes_in(tmp_path / "kv")) == (2, 4 * FILE)


def test_the_order_outlives_a_restart_and_no_content_is_read(tmp_path, monkeypatch):
    made = folder(tmp_path / "kv")
    fill(made, range(5))
    for number, seconds in enumerate((100, 500, 300, 400, 200)):
        age(made, number, seconds)
    monkeypatch.setattr("engine.offload.folder.read_block", None)
    again = folder(tmp_path / "kv", limit=4 * FILE)
    fill(again, [6, 7])  # room for two, and what was over the new limit
    assert held(again, range(8)) == [0, 4, 6, 7]
    assert bytes_in(tmp_path / "kv") == 4 * FILE


def test_uses_are_written_down_for_the_next_start(tmp_path):
    made = folder(tmp_path / "kv")
    fill(made, [1])
    age(made, 1, 1000)
    again = folder(tmp_path / "kv")
    again.touch([digest(1), digest(2)])
    again.record_uses()
    assert again._path(digest(1)).stat().st_mtime > time.time() - 500


def test_blocks_of_another_model_are_not_found_but_count(tmp_path):
    """A deployment's earlier version keeps its blocks for as long as there is room."""
    old = folder(tmp_path / "kv", model=OTHER_MODEL)
    fill(old, [1, 2])
    age(old, 1, 100)
    new = folder(tmp_path / "kv", limit=3 * FILE)
    assert held(new, [1, 2]) == []
    assert new.total_bytes == 2 * FILE
    fill(new, [1, 3])
    assert bytes_in(tmp_path / "kv") == 3 * FILE
    assert old.read(digest(2)) == block(2)
    assert old.read(digest(1)) is None


def test_nothing_is_written_that_alone_exceeds_the_limit(tmp_path):
    made = folder(tmp_path / "kv", limit=FILE - 1)
    fill(made, [1])
    assert bytes_in(tmp_path / "kv") == 0


def test_some_of_the_disk_stays_free(tmp_path, monkeypatch):
    made = folder(tmp_path / "kv")
    monkeypatch.setattr("engine.offload.folder.RESERVE_BYTES", shutil.disk_usage(tmp_path).free)
    with pytest.raises(OSError, match="of the disk are free"):
        fill(made, [1])
    assert bytes_in(tmp_path / "kv") == 0


@pytest.mark.parametrize("removed", ["deployments", "deployments/kv"])
def test_removed_folders_are_made_again(tmp_path, removed):
    made = folder(tmp_path / "deployments/kv")
    fill(made, [1])
    shutil.rmtree(tmp_path / removed)
    fill(made, [2])
    assert made.read(digest(2)) == block(2)
    assert stat.S_IMODE((tmp_path / "deployments/kv").stat().st_mode) == 0o700


def test_workers_see_what_others_add_and_remove(tmp_path):
    one, two = folder(tmp_path / "kv"), folder(tmp_path / "kv")
    fill(one, range(3))
    assert held(two, range(3)) == []
    two.scan()
    assert two.read(digest(2)) == block(2)
    one._path(digest(1)).unlink()
    two.scan()
    assert held(two, range(3)) == [0, 2]
    assert two.total_bytes == 2 * FILE
    shutil.rmtree(tmp_path / "kv" / MODEL.hex())
    two.scan()
    assert (held(two, range(3)), two.total_bytes) == ([], 0)
    assert two.read(digest(0)) is None


def test_what_another_worker_has_just_used_stays(tmp_path):
    made = folder(tmp_path / "kv", limit=2 * FILE)
    fill(made, [1, 2])
    future = time.time() + 100
    os.utime(made._path(digest(1)), (future, future))
    fill(made, [3])
    assert held(made, [1, 2, 3]) == [1, 3]


def test_many_workers_at_once_serve_nothing_wrong_and_keep_the_limit(tmp_path):
    wrong, limit, failures = [], 20 * FILE, []

    def work(seed: int) -> None:
        made = folder(tmp_path / "kv", limit=limit)
        try:
            for step in range(300):
                number = (step * 7 + seed) % 50
                made.write(digest(number), block(number))
                found = made.read(digest((number * 3) % 50))
                if found is not None and found != block((number * 3) % 50):
                    wrong.append(number)
                if step % 20 == 0:
                    made.scan()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, failures) == ([], [])
    last = folder(tmp_path / "kv", limit=limit)
    assert last.damaged == 0
    fill(last, [99])
    assert bytes_in(tmp_path / "kv") <= limit


CRASH = """
import sys
from pathlib import Path
from engine import faults
from tests.engine.test_block_files import block, digest, fill, folder
made = folder(Path(sys.argv[1]))
fill(made, [1])
faults.arm({faults.VARIABLE: "offload.write:exit:9:2", faults.SWITCH: "1"})
fill(made, [2])
"""


def test_a_crash_in_the_middle_of_a_write_leaves_nothing_that_is_served(tmp_path):
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path / "kv")], cwd=ROOT, check=False)
    assert ended.returncode == 9
    (left,) = (tmp_path / "kv").glob(f"*/*/*{PART}")
    made = folder(tmp_path / "kv")
    assert held(made, [1, 2]) == [1]
    assert left.exists()  # its writer may still be at work
    os.utime(left, (0, time.time() - ABANDONED_S - 1))
    made.scan()
    assert not left.exists()


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(OSError, match=name):
            prepare_folder(tmp_path / name)
    (tmp_path / "open").mkdir(mode=0o755)
    prepare_folder(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_names_that_are_no_blocks_are_left_alone(tmp_path):
    made = folder(tmp_path / "kv")
    fill(made, [1])
    strange = [tmp_path / "kv" / "notes", made._path(digest(1)).with_name("notes")]
    for path in strange:
        path.write_text("mine")
    again = folder(tmp_path / "kv")
    assert again.total_bytes == FILE
    assert all(path.exists() for path in strange)


class Rows(HostRows):
    """Rows without torch."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def content(self, row: int) -> memoryview:
        return block(self.numbers[row])


@pytest.fixture
def tier(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "FIRST_SCAN_S", 60.0)
    made = DiskTier(folder(tmp_path / "kv"))
    yield made
    made.close()
    faults.arm({})


def test_a_tier_writes_and_reads_in_the_background(tier):
    tier.store(digest(1), Rows(1, 2), 0)
    tier.store(digest(2), Rows(1, 2), 1)
    tier.flush()
    staged = [Staged(digest(number)) for number in (1, 2, 3)]
    for one in staged:
        tier.fetch(one)
    wait_until(lambda: all(one.done for one in staged))
    assert [one.content for one in staged] == [block(1), block(2), None]
    assert tier.stored == 2


def test_what_nobody_waits_for_is_not_read(tier):
    tier.store(digest(1), Rows(1), 0)
    tier.flush()
    tier.folder.read = lambda digest: pytest.fail("it was read")
    tier.fetch(Staged(digest(1)))
    tier.close()
    assert tier.failures == 0


def test_a_disk_that_is_too_slow_gets_less(tier, monkeypatch):
    monkeypatch.setattr(disk, "QUEUE_BYTES", 2 * SIZE)
    faults.arm({faults.VARIABLE: "offload.write:sleep:0.5:1", faults.SWITCH: "1"})
    assert tier.room(3) == 2
    assert tier.dropped == 1


def test_an_unforeseen_failure_ends_no_thread(tier, monkeypatch):
    write = tier.folder.write
    monkeypatch.setattr(tier.folder, "write", lambda *_: 1 / 0)
    tier.store(digest(1), Rows(1), 0)
    tier.flush()
    assert (tier.failures, tier.room(1)) == (1, 0)
    monkeypatch.setattr(tier.folder, "write", write)
    tier._retry_at = 0.0
    tier.store(digest(1), Rows(1), 0)
    tier.flush()
    assert tier.stored == 1
    with pytest.raises(DamagedFile):
        read_block(tier.folder._path(digest(1)), OTHER_MODEL, digest(1), SIZE)
