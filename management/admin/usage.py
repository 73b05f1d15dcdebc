"""The page of usage: sums by day, which nobody edits, and the same as CSV."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import StreamingHttpResponse
from unfold.decorators import action

from management import usage_store
from management.admin.base import ReadOnlyAdmin
from management.models import UsageDay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.models import QuerySet
    from django.http import HttpRequest

COLUMNS = ["day", "key_name", "deployment_name", "adapter", "end_user", "requests", "failed", "prompt_tokens",
           "cached_tokens", "output_tokens", "last_at"]  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A cell that begins so is computed by spreadsheets; clients choose names of end users."""


@admin.register(UsageDay)
class UsageDayAdmin(ReadOnlyAdmin):
    """Usage by day, key, deployment, adapter and end user."""

    list_display = COLUMNS[:-1]
    list_display_links = None
    date_hierarchy = "day"
    search_fields = ["key", "deployment", "adapter", "end_user"]
    show_full_result_count = False
    actions_list = ["download"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[UsageDay]:
        """With the names of keys and deployments, as they are now."""
        return usage_store.named(super().get_queryset(request))

    @admin.display(description="key", ordering="key")
    def key_name(self, obj: Any) -> str | None:
        """The key's name; its prefix where the key is gone, None without a key."""
        return obj.key_name or obj.key or None

    @admin.display(description="deployment", ordering="deployment")
    def deployment_name(self, obj: Any) -> str:
        """The deployment's name; its id where it is gone."""
        return str(obj.deployment_name or obj.deployment)

    @action(description="Download CSV", url_path="csv", icon="download")
    def download(self, request: HttpRequest) -> StreamingHttpResponse:
        """The rows of the page's search and dates, all of them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        self.check_query(request)
        try:
            rows = self.get_changelist_instance(request).get_queryset(request)
        except IncorrectLookupParameters as error:
            raise BadRequest("The query has an unknown filter.") from error
        response = StreamingHttpResponse(self._lines(rows), content_type="text/csv; charset=utf-8")
        response["Content-Disposition"] = 'attachment; filename="usage.csv"'
        return response

    def _lines(self, rows: QuerySet[UsageDay]) -> Iterator[str]:
        writer = csv.writer(_Line())
        yield writer.writerow(COLUMNS)
        for row in rows.iterator(2000):
            values = [getattr(self, name)(row) if hasattr(self, name) else getattr(row, name) for name in COLUMNS]
            cells = ["" if value is None else str(value) for value in values]
            yield writer.writerow(f"'{cell}" if cell.startswith(FORMULA) else cell for cell in cells)


class _Line:
    """A file whose every write is one line, returned."""

    def write(self, text: str) -> str:
        return text
