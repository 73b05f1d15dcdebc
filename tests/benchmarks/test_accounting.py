"""CPU time goes to the server, to the client, or to others; the processor is named."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from benchmarks.accounting import Meter, idle_cores, machine_cpu_s, tree_cpu_s
from benchmarks.machine import commit, machine, native_dtype
from benchmarks.servers import listening_pid
from tests.waiting import wait_until

BUSY_S = 0.3
CPUINFO = """
processor\t: 0
cpu family\t: 6
model\t\t: 207
model name\t: Some Xeon
flags\t\t: fpu avx512f amx_bf16 avx512_bf16
"""


def use_cpu(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_servers_descendants_are_its_own_even_when_they_have_ended():
    code = (
        "import subprocess, sys, time\n"
        "inner = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "subprocess.run([sys.executable, '-c', inner])\n"
        "print('done', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            meter = Meter(process.pid)
            process.stdout.readline()
            usage = meter.read()
        finally:
            process.kill()
    assert usage.server_cpu_s >= BUSY_S - 0.05
    assert tree_cpu_s(process.pid) == 0.0, "it has ended"


def test_the_clients_own_work_is_the_clients():
    meter = Meter(None)
    use_cpu(BUSY_S)
    usage = meter.read()
    assert usage.client_cpu_s >= BUSY_S
    assert usage.server_cpu_s == 0.0


def test_what_neither_did_is_others():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as stranger:
        try:
            meter = Meter(None)
            wait_until(lambda: tree_cpu_s(stranger.pid) >= BUSY_S)
            usage = meter.read()
        finally:
            stranger.kill()
    # The clock of /proc/stat has ticks of 10 ms.
    assert usage.other_cores * usage.wall_s >= BUSY_S - 0.1
    assert machine_cpu_s()[0] > 0


def test_a_server_that_spins_is_not_idle_and_can_be_held(fake):
    server = fake("spinning", "--spin")
    server.ensure()
    wait_until(lambda: tree_cpu_s(server.pid) > 0.2)
    assert server.hold()
    wait_until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
    assert idle_cores(server.pid, 0.3) == 0.0
    server.release()
    before = tree_cpu_s(server.pid)
    wait_until(lambda: tree_cpu_s(server.pid) > before)


def test_a_running_server_is_found_by_its_port(fake):
    server = fake("fake")
    server.ensure()
    assert listening_pid(server.address.port) == server.pid


def test_the_processor_has_its_name_and_flags():
    found = machine(CPUINFO)
    assert (found.processor, found.family_model) == ("Some Xeon", "6/207")
    assert found.flags == ("avx512f", "avx512_bf16", "amx_bf16")
    assert native_dtype(found.flags) == "bfloat16"
    assert native_dtype(("avx2",)) == "float32"
    here = machine()
    assert here.processor
    assert here.cores > 0
    assert here.memory_gib > 0
    assert len(commit().partition("-")[0]) == 12
