import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("management", "0017_keys_have_ids_of_their_own")]

    operations = [
        migrations.DeleteModel("ApiKey"),
        migrations.RenameModel("NumberedApiKey", "ApiKey"),
        migrations.AlterField(
            model_name="apikey",
            name="deployment",
            field=models.ForeignKey(
                blank=True,
                help_text="The only deployment that the key opens; empty: all.",
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="keys",
                to="management.deployment",
            ),
        ),
    ]
