"""The suite as Locust runs it; `python -m loadtests` calls this with the run in LOAD_RUN.

locust -f loadtests/locustfile.py --headless -H http://127.0.0.1:8000 -u 8 -r 8 -t 30s
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from locust import LoadTestShape, events
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.current import CURRENT, STAGE_MESSAGE, Order
from loadtests.plan import PROFILES, Stage
from loadtests.records import make_record
from loadtests.settings import Addresses, run_settings
from loadtests.shapes import DIALECTS, SHAPES
from loadtests.sizes import sized
from loadtests.staged import StagedShape
from loadtests.targets import load_targets
from loadtests.users.djl import DJLStreamUser
from loadtests.users.kinds import BadBodyUser, ChatSessionUser, EngineUser, LongPromptUser, ProbeUser, ShortPromptUser
from loadtests.users.mindie import MindIEStreamUser, MindIEUser
from loadtests.users.openai import (
    OpenAIChatStreamUser,
    OpenAIChatUser,
    OpenAICompletionStreamUser,
    OpenAICompletionUser,
)
from loadtests.users.rude import HangUpUser, NonReaderUser
from loadtests.users.tgi import TGIStreamUser, TGIUser
from loadtests.users.torchserve import TorchServeStreamUser
from loadtests.users.triton import TritonGenerateUser, TritonGrpcUser, TritonInferUser, TritonStreamUser
from loadtests.users.vllm import VLLMStreamUser

USERS = (
    BadBodyUser, ChatSessionUser, DJLStreamUser, EngineUser, HangUpUser, LongPromptUser, MindIEStreamUser, MindIEUser,
    NonReaderUser, OpenAIChatStreamUser, OpenAIChatUser, OpenAICompletionStreamUser, OpenAICompletionUser, ProbeUser,
    ShortPromptUser, TGIStreamUser, TGIUser, TorchServeStreamUser, TritonGenerateUser, TritonGrpcUser, TritonInferUser,
    TritonStreamUser, VLLMStreamUser,
)  # fmt: skip
LAST_REQUESTS_S = 60.0
RUN = run_settings()


if RUN is not None:
    plan_of_run = SHAPES[RUN.shape].plan(sized(PROFILES[RUN.profile], RUN))

    class Shape(StagedShape):
        """The shape of this run."""

        plan = plan_of_run
        local = RUN.local if RUN else None
        user_classes = {user.__name__: user for user in USERS}


@events.init.add_listener
def prepare(environment: Any, runner: Any, **_: Any) -> None:
    """Let stages and samples travel between a master and its workers."""
    if RUN is not None:  # Locust's own tables have the same requests without stages
        logging.getLogger("locust.stats_logger").setLevel(logging.WARNING)
    if not isinstance(runner, LocalRunner):
        environment.events.report_to_master.add_listener(_report)
        environment.events.worker_report.add_listener(_take)
    if not isinstance(runner, MasterRunner):
        runner.register_message(STAGE_MESSAGE, CURRENT.hear)
    addresses = Addresses.of_host(environment.host or Addresses().front)
    if isinstance(environment.shape_class, StagedShape):
        environment.shape_class.addresses = addresses
    elif not isinstance(runner, WorkerRunner):
        # Locust's own options say how many users there are; those of dialects do a plain closed loop.
        everyone = Stage("free", 0, 0, DIALECTS)
        environment.user_classes[:] = [user for user in environment.user_classes if user.__name__ in DIALECTS]
        CURRENT.begin(Order(everyone, addresses))


def _report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    CURRENT.collection.give(data)


def _take(client_id: str, data: dict[str, Any], **_: Any) -> None:
    CURRENT.collection.take(data, client_id)


@events.test_stop.add_listener
def wait_for_last_requests(**_: Any) -> None:
    """Requests of open loops have outlived their users."""
    CURRENT.pending.join(timeout=LAST_REQUESTS_S)
    CURRENT.pending.kill()


@events.quitting.add_listener
def judge(environment: Any, **_: Any) -> None:
    """Write the run, compare it with its targets, and set the exit status."""
    shape: LoadTestShape | None = environment.shape_class
    if RUN is None or not isinstance(shape, StagedShape) or isinstance(environment.runner, WorkerRunner):
        return
    shape.close()
    targets = load_targets(Path(RUN.targets), RUN.profile, [RUN.shape])[RUN.shape]
    record = make_record(RUN, shape.plan, CURRENT.collection.samples, shape.windows, shape.observations, targets)
    print(record.text())
    if RUN.out:
        record.write(Path(RUN.out))
    environment.process_exit_code = 0 if record.met else 1
