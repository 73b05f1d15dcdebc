"""The admin's WebSocket: staff sees what runs, others see nothing."""

from __future__ import annotations

import pytest
from channels.db import database_sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.db import OperationalError

from config.unavailable import while_available
from engine.messages import Stats
from management import live
from management.models import Worker
from management.services.deployments import change_deployment, create_deployment
from management.services.models import register_model
from management.status import StatusConsumer

pytestmark = pytest.mark.django_db(transaction=True)


def communicator(user):
    made = WebsocketCommunicator(StatusConsumer.as_asgi(), "/ws/status")
    made.scope["user"] = user
    return made


async def test_staff_sees_workers_with_their_load(monkeypatch):
    def rows():
        deployment = create_deployment("demo", register_model("demo", "/models/demo", "tester"), "tester")
        change_deployment(deployment, "tester", max_workers=2, prefill_workers=1)
        for index, epoch in ((0, 3), (1, 4)):
            Worker.objects.create(
                deployment=deployment, version=deployment.version, index=index, epoch=epoch, state="ready", address="x"
            )
        user = User.objects.create_user("staff", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=["view_deployment", "view_worker"]))
        return user

    user = await database_sync_to_async(rows)()
    monkeypatch.setattr(
        live, "_source", lambda: {"demo/0": Stats(running=2, waiting=1, blocks_total=10, blocks_used=5)}
    )
    socket = communicator(user)
    assert (await socket.connect())[0]
    status = await socket.receive_json_from(5)
    assert status["deployments"][0]["deployment"] == "demo"
    assert {worker["worker"]: worker["role"] for worker in status["workers"]} == {
        "demo/0": "Prefill",
        "demo/1": "Decode",
    }
    (worker,) = [worker for worker in status["workers"] if worker["worker"] == "demo/0"]
    assert (worker["state"], worker["running"], worker["kv_usage_percent"]) == ("Ready", 2, 50.0)
    await socket.disconnect()


async def test_staff_sees_only_what_it_may_look_at():
    def rows():
        create_deployment("demo", register_model("demo", "/models/demo", "tester"), "tester")
        return User.objects.create_user("staff", is_staff=True)

    socket = communicator(await database_sync_to_async(rows)())
    assert (await socket.connect())[0]
    assert await socket.receive_json_from(5) == {"deployments": [], "workers": []}
    await socket.disconnect()


async def test_a_page_is_turned_away_while_the_database_is_away():
    async def application(scope, receive, send):
        raise OperationalError("away")

    connected, code = await WebsocketCommunicator(while_available(application), "/ws/status").connect()
    assert (connected, code) == (False, 1013)


@pytest.mark.parametrize("user", [AnonymousUser(), User(username="x")])
async def test_others_are_turned_away(user):
    connected, code = await communicator(user).connect()
    assert not connected
    assert code == 4403
