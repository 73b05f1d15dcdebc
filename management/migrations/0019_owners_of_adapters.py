import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("management", "0018_keys_in_one_table")]

    operations = [
        migrations.RemoveConstraint(model_name="adapter", name="one_adapter_per_name_and_model"),
        migrations.AlterField(
            model_name="adapter",
            name="model",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="adapters",
                to="management.model",
            ),
        ),
        migrations.AddField(
            model_name="adapter",
            name="deployment",
            field=models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.CASCADE, related_name="+", to="management.deployment"
            ),
        ),
    ]
