import management.models.deployment
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("management", "0007_values_of_earlier_deployments")]

    operations = [
        migrations.AlterField(
            model_name='deployment',
            name='public_id',
            field=models.CharField(default=management.models.deployment.new_public_id, editable=False, max_length=32, unique=True),
        ),
    ]
