"""How often the admin's pages ask the database."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from management.services.models import register_model

PAGES = ["model_changelist", "deployment_changelist", "deployment_add", "adapter_add", "worker_changelist"]


def queries_of(client, page) -> int:
    with CaptureQueriesContext(connection) as queries:
        assert client.get(reverse(f"admin:management_{page}")).status_code == 200
    return len(queries)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_asks_no_more_often_for_more_rows(admin_client, deployment, page):
    queries_of(admin_client, page)  # what is asked once and kept
    before = queries_of(admin_client, page)
    for number in range(5):
        register_model(f"another-{number}", "hub/another", "tester")
        deployment.workers.create(version=deployment.version, index=number, epoch=1)
    assert queries_of(admin_client, page) == before
