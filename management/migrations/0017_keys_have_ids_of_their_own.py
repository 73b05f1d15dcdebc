"""Gives API keys ids of their own: the ids of before were made of the prefix and the hash, and stood in addresses.

A table's key cannot be altered from text to a number everywhere, so the rows move to a new table, oldest first. The
next migration gives it the old one's name: PostgreSQL does not rename a table in the transaction that fills it.
"""

import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import management.models.access

COPIED = (
    "prefix", "hashed_key", "name", "revoked", "expiry_date", "scopes", "deployment_id", "weight", "requests_per_minute",
    "tokens_per_minute", "tokens_per_day",
)  # fmt: skip


def copy(apps, schema_editor):
    """Copy the rows, and put the new ids into the admin's own history of them."""
    old, new = apps.get_model("management", "ApiKey"), apps.get_model("management", "NumberedApiKey")
    history = apps.get_model("admin", "LogEntry").objects.filter(
        content_type__app_label="management", content_type__model="apikey"
    )
    for key in old.objects.order_by("created", "prefix"):
        numbered = new.objects.create(**{field: getattr(key, field) for field in COPIED})
        new.objects.filter(pk=numbered.pk).update(created=key.created)
        history.filter(object_id=key.pk).update(object_id=str(numbered.pk))


def copy_back(apps, schema_editor):
    """Copy the rows back, with ids made of prefix and hash."""
    old, new = apps.get_model("management", "ApiKey"), apps.get_model("management", "NumberedApiKey")
    for key in new.objects.order_by("pk"):
        named = old.objects.create(
            id=f"{key.prefix}.{key.hashed_key}", **{field: getattr(key, field) for field in COPIED}
        )
        old.objects.filter(pk=named.pk).update(created=key.created)


class Migration(migrations.Migration):
    dependencies = [("management", "0016_spare_workers"), ("admin", "0003_logentry_add_action_flag_choices")]

    operations = [
        migrations.CreateModel(
            name="NumberedApiKey",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("prefix", models.CharField(editable=False, max_length=8, unique=True)),
                ("hashed_key", models.CharField(editable=False, max_length=150)),
                ("created", models.DateTimeField(auto_now_add=True, db_index=True)),
                (
                    "name",
                    models.CharField(
                        default=None,
                        help_text="A free-form name for the API key. Need not be unique. 50 characters max.",
                        max_length=50,
                    ),
                ),
                (
                    "revoked",
                    models.BooleanField(
                        blank=True,
                        default=False,
                        help_text="If the API key is revoked, clients cannot use it anymore. (This cannot be undone.)",
                    ),
                ),
                (
                    "expiry_date",
                    models.DateTimeField(
                        blank=True,
                        help_text="Once API key expires, clients cannot use it anymore.",
                        null=True,
                        verbose_name="Expires",
                    ),
                ),
                (
                    "scopes",
                    models.JSONField(
                        default=management.models.access.default_scopes,
                        help_text="What the key allows: any of infer, metrics, manage.",
                    ),
                ),
                (
                    "deployment",
                    models.ForeignKey(
                        blank=True,
                        help_text="The only deployment that the key opens; empty: all.",
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="management.deployment",
                    ),
                ),
                (
                    "weight",
                    models.FloatField(
                        blank=True,
                        default=1.0,
                        help_text="Its share of a busy server among other keys: one of weight 2 is served twice as many tokens as one of 1.",
                        validators=[
                            django.core.validators.MinValueValidator(0.01),
                            django.core.validators.MaxValueValidator(1000.0),
                        ],
                    ),
                ),
                (
                    "requests_per_minute",
                    models.PositiveIntegerField(
                        blank=True,
                        default=0,
                        help_text="Requests a minute, counted by each web process; 0: any number.",
                        validators=[django.core.validators.MaxValueValidator(2147483647)],
                    ),
                ),
                (
                    "tokens_per_minute",
                    models.PositiveIntegerField(
                        blank=True,
                        default=0,
                        help_text="Prompt and output tokens a minute, counted by each web process; 0: any number.",
                        validators=[django.core.validators.MaxValueValidator(2147483647)],
                    ),
                ),
                (
                    "tokens_per_day",
                    models.PositiveBigIntegerField(
                        blank=True,
                        default=0,
                        help_text="The same for a day of UTC; a restart of the process begins anew. 0: any number.",
                        validators=[django.core.validators.MaxValueValidator(9223372036854775807)],
                    ),
                ),
            ],
            options={
                "verbose_name": "API key",
                "verbose_name_plural": "API keys",
                "ordering": ("-created",),
                "abstract": False,
            },
        ),
        migrations.RunPython(copy, copy_back),
    ]
