from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("management", "0010_versions_of_earlier_adapters")]

    operations = [
        migrations.RemoveField(
            model_name="adapter",
            name="digest",
        ),
        migrations.RemoveField(
            model_name="adapter",
            name="rank",
        ),
        migrations.RemoveField(
            model_name="adapter",
            name="source",
        ),
    ]
