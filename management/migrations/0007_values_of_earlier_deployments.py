from django.db import migrations

from management.models.deployment import new_public_id

STATES = {"ready": "active", "starting": "provisioning", "stopping": "inactive", "stopped": "inactive"}
PRICES = {"": 0.0, "T4": 0.35, "L4": 0.7, "A10G": 1.0, "L40S": 1.2, "A100": 1.5, "A100_80GB": 1.9, "H100_80GB": 2.9, "H200": 3.8}
"""A first price table, in USD per hour and accelerator; the operator edits it."""


def fill(apps, schema_editor):
    Deployment = apps.get_model("management", "Deployment")
    for row in Deployment.objects.select_related("version__model"):
        row.public_id = new_public_id()
        row.title = row.name
        row.inference_kind = row.version.model.kind
        row.state = STATES.get(row.state, row.state)
        row.min_workers = row.max_workers = max(1, row.replicas)
        row.target_workers = row.replicas
        if row.inference_kind == "embedding":
            row.strategy = "rps_per_worker"
        row.save()
    Price = apps.get_model("management", "Price")
    for gpu_type, price in PRICES.items():
        Price.objects.create(gpu_type=gpu_type, price_per_hour=price)


class Migration(migrations.Migration):
    dependencies = [("management", "0006_deployments")]

    operations = [migrations.RunPython(fill, migrations.RunPython.noop)]
