"""Django's settings, derived from the options."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.urls import reverse_lazy

from config.installation import DATABASE
from config.options import get_options
from engine.process.flight import FOLDER
from management.generated import generated

options = get_options()

CONNECT_TIMEOUT_S = 3
STATEMENT_TIMEOUT_S = 5
"""The registries are small: a longer statement waits for a database that is away, paused or locked."""


def _database(url: str) -> dict[str, Any]:
    if not url:
        pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": options.data_dir / DATABASE,
            "OPTIONS": {"init_command": pragmas, "transaction_mode": "IMMEDIATE", "timeout": STATEMENT_TIMEOUT_S},
        }
    parts = urlsplit(url)
    return {
        "ENGINE": "config.postgresql",  # Django's own backend, with a timeout for every wait
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": parts.port or "",
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "options": f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c idle_in_transaction_session_timeout=60s",
            **dict(parse_qsl(parts.query)),
        },
    }


options.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
SECRET_KEY = options.session_key or generated(options.data_dir / "secret-key", lambda: secrets.token_urlsafe(48))
DEBUG = False
ALLOWED_HOSTS = ["*"]  # config.asgi checks Host before Django runs, by one rule for all planes
INSTALLED_APPS = [
    "daphne",
    "management",  # before the theme, some of whose templates it replaces
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "rest_framework_api_key",
    "channels",
    "config",
]
MIDDLEWARE = [
    "management.publishing.publish_writes",
    "management.protection.content_security_policy",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "management.protection.login_throttle",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "config.urls"
LOGIN_REDIRECT_URL = "/admin/"  # where the login page leads when it was opened directly
ASGI_APPLICATION = "config.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
MAX_ADAPTER_BYTES = options.max_adapter_bytes
ADAPTER_STORE = options.data_dir / "adapters"
KV_OFFLOAD = options.data_dir / "kv-offload"
FLIGHT_RECORDINGS = options.data_dir / FOLDER
ADAPTER_ROOTS = options.allowed_adapter_roots([options.host])
MODEL_ROOTS = options.allowed_model_roots
API_KEY_REQUIRED = options.api_key_required
LAUNCHER = options.launcher
FRONT_URL = options.front_url
MODEL = options.model
ENGINE_OPTIONS = options.engine_options
DATA_UPLOAD_MAX_MEMORY_SIZE = options.max_body_bytes
SECRETS_KEY = options.secrets_key.get_secret_value()
SECRETS_KEY_FILE = options.data_dir / "secrets-key"
DATABASES = {"default": _database(options.database_url)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
REST_FRAMEWORK = {"DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAdminUser"]}
AUTH_PASSWORD_VALIDATORS = [{"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"}]
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False
USE_TZ = True
TIME_ZONE = "UTC"
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "OPTIONS": {"MAX_ENTRIES": 100_000}}}
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Strict"
SESSION_COOKIE_HTTPONLY = True
BEHIND_TLS = options.behind_tls
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = BEHIND_TLS or options.scheme == "https"
if BEHIND_TLS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
X_FRAME_OPTIONS = "DENY"
LOGGING_CONFIG = None  # config.logs configures logging
UNFOLD = {
    "SITE_TITLE": "Dragoman",
    "SITE_HEADER": "Dragoman",
    "SITE_SYMBOL": "translate",
    "SIDEBAR": {
        "navigation": [
            {
                "title": "Serving",
                "items": [
                    {"title": "Deployments", "icon": "rocket_launch", "link": reverse_lazy("admin:management_deployment_changelist")},
                    {"title": "Workers", "icon": "memory", "link": reverse_lazy("admin:management_worker_changelist")},
                    {"title": "Models", "icon": "deployed_code", "link": reverse_lazy("admin:management_model_changelist")},
                    {"title": "Machines", "icon": "dns", "link": reverse_lazy("admin:management_node_changelist")},
                    {"title": "Prices", "icon": "payments", "link": reverse_lazy("admin:management_price_changelist")},
                    {"title": "Adapters", "icon": "extension", "link": reverse_lazy("admin:management_adapter_changelist")},
                ],
            },
            {
                "title": "Access",
                "items": [
                    {"title": "API keys", "icon": "key", "link": reverse_lazy("admin:management_apikey_changelist")},
                    {"title": "Usage", "icon": "bar_chart", "link": reverse_lazy("admin:management_usageday_changelist")},
                    {"title": "Audit events", "icon": "history", "link": reverse_lazy("admin:management_auditevent_changelist")},
                    {"title": "Users", "icon": "person", "link": reverse_lazy("admin:auth_user_changelist")},
                ],
            },
        ]
    },
}  # fmt: skip
