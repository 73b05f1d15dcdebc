"""Keys of before they had ids of their own: they open what they opened, and their ids say nothing."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from rest_framework_api_key.crypto import KeyGenerator

from management.models import ApiKey

OLD, NEW = ("management", "0016_spare_workers"), ("management", "0018_keys_in_one_table")


@pytest.mark.django_db(transaction=True)
def test_keys_get_ids_and_lose_nothing():
    before = MigrationExecutor(connection).migrate([OLD]).apps.get_model("management", "ApiKey")
    texts = []
    for number in range(3):
        text, prefix, hashed = KeyGenerator().generate()
        before.objects.create(
            id=f"{prefix}.{hashed}", prefix=prefix, hashed_key=hashed, name=f"k{number}", requests_per_minute=number
        )
        texts.append(text)
    created = list(before.objects.order_by("name").values_list("created", flat=True))
    user = User.objects.create(username="somebody")
    kind = ContentType.objects.get(app_label="management", model="apikey")
    entry = LogEntry.objects.create(
        user=user, content_type=kind, object_id=before.objects.get(name="k1").pk, action_flag=CHANGE
    )
    MigrationExecutor(connection).migrate([NEW])
    keys = list(ApiKey.objects.order_by("name"))
    assert [ApiKey.objects.get_from_key(text) for text in texts] == keys
    assert [(key.created, key.requests_per_minute) for key in keys] == list(zip(created, range(3), strict=True))
    assert [key.pk for key in keys] == sorted(key.pk for key in keys)
    assert LogEntry.objects.get(pk=entry.pk).object_id == str(keys[1].pk)
    after = MigrationExecutor(connection).migrate([OLD]).apps.get_model("management", "ApiKey")
    assert [key.id for key in after.objects.order_by("name")] == [f"{key.prefix}.{key.hashed_key}" for key in keys]
    newest = MigrationExecutor(connection)
    newest.migrate(newest.loader.graph.leaf_nodes("management"))
    assert ApiKey.objects.count() == 3
