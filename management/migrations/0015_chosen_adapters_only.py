from django.db import migrations, models


def chosen_before(apps, schema_editor):
    """Deployments with adapters had chosen them."""
    apps.get_model("management", "Deployment").objects.filter(adapters__isnull=False).update(chosen_adapters_only=True)


class Migration(migrations.Migration):

    dependencies = [
        ('management', '0014_prefill_workers'),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='chosen_adapters_only',
            field=models.BooleanField(default=False, editable=False, help_text='Whether adapters were chosen: if all of these are removed, the deployment serves none.'),
        ),
        migrations.RunPython(chosen_before, migrations.RunPython.noop),
    ]
