from django.db import migrations


def give_owners(apps, schema_editor):
    """Each deployment that serves an adapter of its model gets it as its own. An adapter that none serves goes; the
    audit log keeps where it came from.
    """
    Adapter, AuditEvent = apps.get_model("management", "Adapter"), apps.get_model("management", "AuditEvent")
    Deployment = apps.get_model("management", "Deployment")
    living = Deployment.objects.filter(deleted=False).select_related("version").order_by("created_at", "pk")
    for adapter in Adapter.objects.filter(deployment=None):
        owners = [
            deployment
            for deployment in living.filter(version__model=adapter.model_id)
            if not deployment.chosen_adapters_only or deployment.adapters.filter(pk=adapter.pk).exists()
        ]
        if not owners:
            current = adapter.versions.filter(is_current=True).first()
            details = {"model": adapter.model.name, "source": current.source if current else ""}
            AuditEvent.objects.create(actor="migration", action="adapter.remove", target=adapter.name, details=details)
            adapter.delete()
            continue
        for owner in owners[1:]:
            _copy(Adapter.objects.get(pk=adapter.pk), owner)
        adapter.deployment = owners[0]
        adapter.save()


def _copy(adapter, owner):
    versions, created_at = list(adapter.versions.all()), adapter.created_at
    adapter.pk, adapter.deployment = None, owner
    adapter._state.adding = True
    adapter.save()
    type(adapter).objects.filter(pk=adapter.pk).update(created_at=created_at)  # which a new row sets itself
    for version in versions:
        created_at = version.created_at
        version.pk, version.adapter = None, adapter
        version._state.adding = True
        version.save()
        type(version).objects.filter(pk=version.pk).update(created_at=created_at)


def give_models(apps, schema_editor):
    """Backwards: each model gets the adapters of its deployments, of one name that of the first; each deployment keeps
    its own.
    """
    Adapter = apps.get_model("management", "Adapter")
    apps.get_model("management", "Deployment").objects.filter(deleted=False).update(chosen_adapters_only=True)
    for adapter in Adapter.objects.select_related("deployment__version").order_by("pk"):
        deployment, model = adapter.deployment, adapter.deployment.version.model_id
        first = Adapter.objects.filter(model=model, name=adapter.name).first()
        if first is None:
            adapter.model_id = model
            adapter.save()
        else:
            adapter.delete()
        deployment.adapters.add(first or adapter)


class Migration(migrations.Migration):
    dependencies = [("management", "0019_owners_of_adapters")]

    operations = [migrations.RunPython(give_owners, give_models)]
