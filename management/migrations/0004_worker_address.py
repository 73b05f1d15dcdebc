from django.db import migrations, models
from django.db.models import F, Value
from django.db.models.functions import Concat


def paths_to_addresses(apps, schema_editor):
    apps.get_model('management', 'Worker').objects.update(address=Concat(Value('unix:'), F('address')))


class Migration(migrations.Migration):

    dependencies = [
        ('management', '0003_manage_scope'),
    ]

    operations = [
        migrations.RenameField(model_name='worker', old_name='socket', new_name='address'),
        migrations.AlterField(
            model_name='worker',
            name='address',
            field=models.CharField(help_text='Where it listens.', max_length=256),
        ),
        migrations.RunPython(paths_to_addresses, migrations.RunPython.noop),
    ]
