import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('management', '0012_names_end_with_their_last_character'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='requests_per_minute',
            field=models.PositiveIntegerField(blank=True, default=0, help_text='Requests a minute, counted by each web process; 0: any number.', validators=[django.core.validators.MaxValueValidator(2147483647)]),
        ),
        migrations.AddField(
            model_name='apikey',
            name='tokens_per_day',
            field=models.PositiveBigIntegerField(blank=True, default=0, help_text='The same for a day of UTC; a restart of the process begins anew. 0: any number.', validators=[django.core.validators.MaxValueValidator(9223372036854775807)]),
        ),
        migrations.AddField(
            model_name='apikey',
            name='tokens_per_minute',
            field=models.PositiveIntegerField(blank=True, default=0, help_text='Prompt and output tokens a minute, counted by each web process; 0: any number.', validators=[django.core.validators.MaxValueValidator(2147483647)]),
        ),
        migrations.AddField(
            model_name='apikey',
            name='weight',
            field=models.FloatField(blank=True, default=1.0, help_text='Its share of a busy server among other keys: one of weight 2 is served twice as many tokens as one of 1.', validators=[django.core.validators.MinValueValidator(0.01), django.core.validators.MaxValueValidator(1000.0)]),
        ),
    ]
