from django.db import migrations


def fill(apps, schema_editor):
    """The content of adapters that were registered before there was a store stays where it is."""
    AdapterVersion = apps.get_model("management", "AdapterVersion")
    for row in apps.get_model("management", "Adapter").objects.all():
        AdapterVersion.objects.create(
            adapter=row, number=1, digest=row.digest, rank=row.rank, source=row.source, directory=row.source
        )


class Migration(migrations.Migration):
    dependencies = [("management", "0009_adapter_versions")]

    operations = [migrations.RunPython(fill, migrations.RunPython.noop)]
