"""The control plane's URLs."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(url="/admin/")),
    path("admin/", admin.site.urls),
    path("", include("management.api.scalegenai.urls")),
]

handler500 = "config.unavailable.server_error"
