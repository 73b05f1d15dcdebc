"""The API's calls. Each answers as the vendor's command line reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import structlog
from django.core.exceptions import RequestDataTooBig
from django.db import Error
from django.http import HttpResponse, JsonResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from management.api import authorization
from management.api.scalegenai import changes
from management.api.scalegenai.answers import answers_of, listed_deployments, shown_deployments
from management.api.scalegenai.body import decode_object
from management.api.scalegenai.creation import create
from management.api.scalegenai.errors import ApiError
from management.api.scalegenai.openapi import document
from management.availability import RETRY_AFTER_S, is_unavailable
from management.database_errors import one_line
from management.models import Model, Node, Worker
from management.services.errors import RegistryError
from management.services.secrets import ENDPOINT_KEY, read_secret

if TYPE_CHECKING:
    from django.http import HttpRequest

logger = structlog.get_logger(__name__)

ACTOR = "scalegenai"
"""Who acts, in audit events, where no keys are required."""
NO_CONTENT = 204
"""The vendor's answer for an empty list and for an unknown deployment."""


@method_decorator(csrf_exempt, name="dispatch")  # callers present a key, never a session
class ApiView(View):
    """Checks the caller, decodes the body, runs the method, and renders refusals as JSON."""

    http_method_names: ClassVar[list[str]] = ["get", "post", "put", "patch", "delete"]
    public: ClassVar[bool] = False
    """Whether it needs no key."""

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        self.warning = ""
        self.actor = ACTOR

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Handle one request."""
        try:
            if not self.public:
                self.actor = self._caller(request)
            handler = getattr(self, (request.method or "").lower(), None)
            if (request.method or "").lower() not in self.http_method_names or handler is None:
                raise ApiError(405, f"{request.method} is not allowed", {"Allow": self._allowed()})
            response: HttpResponse = handler(request, **kwargs)
        except ApiError as error:
            response = JsonResponse(error.body, status=error.status, headers=error.headers)
        except Error as error:
            if not is_unavailable(error):
                raise
            logger.warning("database not reachable", error=one_line(error))
            body = {"success": False, "message": "the registry is not reachable at the moment"}
            response = JsonResponse(body, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
        if self.warning:
            response.headers["Warning"] = self.warning
        return response

    def body(self, required: bool = True) -> dict[str, Any]:
        """The JSON object of the request; {} for an absent one that is not `required`. Raises ApiError."""
        try:
            data = self.request.body
        except RequestDataTooBig as error:
            raise ApiError(413, "the body is too large") from error
        if not data.strip() and not required:
            return {}
        body, self.warning = decode_object(data)
        return body

    def _caller(self, request: HttpRequest) -> str:
        try:
            return authorization.caller(request, ACTOR)
        except authorization.Unauthorized as error:
            raise ApiError(401, authorization.KEY_REQUIRED, {"WWW-Authenticate": "Bearer"}) from error
        except authorization.Forbidden as error:
            raise ApiError(403, f"this API key lacks the scope {authorization.SCOPE}") from error

    def _allowed(self) -> str:
        return ", ".join(name.upper() for name in self.http_method_names if hasattr(self, name))


def done(message: str) -> JsonResponse:
    """The vendor's answer to a change."""
    return JsonResponse({"success": True, "message": message})


class ListView(ApiView):
    """`/sg_inf/list`."""

    def get(self, request: HttpRequest) -> HttpResponse:
        """A bare array, or 204 when there is none."""
        found = answers_of(listed_deployments())
        return JsonResponse(found, safe=False) if found else HttpResponse(status=NO_CONTENT)


class CreateView(ApiView):
    """`/sg_inf/create`."""

    def post(self, request: HttpRequest) -> HttpResponse:
        """Create and start a deployment."""
        deployment = create(self.body(), self.actor)
        return JsonResponse({"success": True, "message": {"inf_id": deployment.public_id}})


class DeploymentView(ApiView):
    """`/sg_inf/{id}`."""

    def get(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """The deployment in the documented envelope; 204 for an unknown id, which the command line reads as not found."""
        row = shown_deployments().filter(public_id=changes.checked_id(public_id)).first()
        if row is None:
            return HttpResponse(status=NO_CONTENT)
        return JsonResponse({"success": True, "message": "ok", **answers_of([row])[0]})

    def delete(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """Delete; the deployment can still be read afterwards."""
        return done(changes.delete(public_id, request.GET.get("force", ""), self.actor))

    def put(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """Change the given fields."""
        changes.update(public_id, self.body(), self.actor)
        return done("updated")

    patch = put
    post = put


class UpdateView(ApiView):
    """`/sg_inf/{id}/update`."""

    def post(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """Change the given fields."""
        changes.update(public_id, self.body(), self.actor)
        return done("updated")

    put = post
    patch = post


class ScaleUpView(ApiView):
    """`/sg_inf/{id}/scale/up`."""

    def post(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """Ask for more workers, or wake the deployment."""
        body = self.body(required=False)
        if "vm_num" in request.GET:
            body["vm_num"] = request.GET["vm_num"]
        return done(changes.scale_up(public_id, body, self.actor))


class ScaleZeroView(ApiView):
    """`/sg_inf/{id}/scale/zero`."""

    def post(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """Remove all workers."""
        return done(changes.scale_to_zero(public_id, request.GET.get("force", ""), self.actor))


class NodesView(ApiView):
    """`/sg_inf/{id}/gpu_nodes_ips`."""

    def get(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """The machines that run the deployment's workers."""
        names = changes.find(public_id).workers.filter(state__in=Worker.LIVE).values("node")
        nodes = Node.objects.filter(name__in=names)
        found = [{"id": node.name, "ip": node.address, "tailscale_ip": None} for node in nodes]
        return JsonResponse(found, safe=False)


class ModelsView(ApiView):
    """`/sg_inf/supported_models`."""

    def get(self, request: HttpRequest) -> HttpResponse:
        """The registered models."""
        return JsonResponse([{"model": model.name, "type": model.kind} for model in Model.objects.all()], safe=False)


class SecretView(ApiView):
    """`/secret/AUTH_ENDPOINT_KEY_{id}`."""

    def get(self, request: HttpRequest, public_id: str) -> HttpResponse:
        """The API key of the deployment's endpoint."""
        row = changes.find(public_id)
        try:
            key = None if row.deleted else read_secret(row, ENDPOINT_KEY)
        except RegistryError as error:
            raise ApiError(500, str(error)) from error
        if key is None:
            raise ApiError(404, "the deployment has no key of its own")
        response = JsonResponse({"secret": {f"AUTH_ENDPOINT_KEY_{row.public_id}": key}})
        response.headers["Cache-Control"] = "no-store"
        return response


class VerifyView(ApiView):
    """`/user/verify`."""

    def post(self, request: HttpRequest) -> HttpResponse:
        """Say who calls: the name of the API key."""
        return JsonResponse({"email": self.actor})


class DocumentView(ApiView):
    """`/sg_inf/openapi.json`."""

    public = True

    def get(self, request: HttpRequest) -> HttpResponse:
        """Describe the API as OpenAPI 3.1."""
        return JsonResponse(document())


@method_decorator(csrf_exempt, name="dispatch")  # an exemption holds for one `dispatch`, not for those that override it
class UnknownView(ApiView):
    """Every other path below the API's."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        error = ApiError(404, "there is no such call")
        return JsonResponse(error.body, status=error.status)
