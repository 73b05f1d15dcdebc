import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('management', '0013_limits_of_keys'),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='prefill_workers',
            field=models.PositiveIntegerField(default=0, help_text='Workers that only compute prompts and hand the blocks to the others; 0: each does both.', validators=[django.core.validators.MaxValueValidator(1000)]),
        ),
    ]
