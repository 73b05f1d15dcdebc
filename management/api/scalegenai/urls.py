"""The API's routes, at the root of the control plane."""

from __future__ import annotations

from django.urls import re_path

from management.api.scalegenai import views

_ID = r"(?P<public_id>[^/]+)"

urlpatterns = [
    re_path(r"^sg_inf/list/?$", views.ListView.as_view()),
    re_path(r"^sg_inf/create/?$", views.CreateView.as_view()),
    re_path(r"^sg_inf/supported[_-]models/?$", views.ModelsView.as_view()),
    re_path(r"^sg_inf/openapi\.json$", views.DocumentView.as_view()),
    re_path(rf"^sg_inf/{_ID}/?$", views.DeploymentView.as_view()),
    re_path(rf"^sg_inf/{_ID}/update/?$", views.UpdateView.as_view()),
    re_path(rf"^sg_inf/{_ID}/scale/up/?$", views.ScaleUpView.as_view()),
    re_path(rf"^sg_inf/{_ID}/scale/zero/?$", views.ScaleZeroView.as_view()),
    re_path(rf"^sg_inf/{_ID}/gpu_nodes_ips/?$", views.NodesView.as_view()),
    re_path(rf"^secret/AUTH_ENDPOINT_KEY_{_ID}/?$", views.SecretView.as_view()),
    re_path(r"^user/verify/?$", views.VerifyView.as_view()),
    re_path(r"^(?:sg_inf|secret)(?:/.*)?$", views.UnknownView.as_view()),
]
