import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("management", "0020_owners_of_earlier_adapters")]

    operations = [
        migrations.RemoveField(model_name="adapter", name="model"),
        migrations.RemoveField(model_name="deployment", name="adapters"),
        migrations.RemoveField(model_name="deployment", name="chosen_adapters_only"),
        migrations.AlterField(
            model_name="adapter",
            name="deployment",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="adapters", to="management.deployment"
            ),
        ),
        migrations.AlterField(
            model_name="adapter",
            name="workers",
            field=models.PositiveIntegerField(
                default=0,
                help_text="Workers of the deployment that load it before the first request; 0 is all. "
                "Others load it when they need it.",
            ),
        ),
        migrations.AlterField(
            model_name="deployment",
            name="inference_kind",
            field=models.CharField(
                choices=[("llm", "Language model"), ("embedding", "Embedding model")],
                default="llm",
                help_text="What its workers use the model for.",
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="adapter",
            constraint=models.UniqueConstraint(
                fields=("deployment", "name"),
                name="one_adapter_per_name_and_deployment",
                violation_error_message="An adapter with this name exists.",
            ),
        ),
    ]
