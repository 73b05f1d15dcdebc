import django.core.validators
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('management', '0008_unique_public_ids'),
    ]

    operations = [
        migrations.CreateModel(
            name='AdapterVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('digest', models.CharField(max_length=64)),
                ('rank', models.PositiveIntegerField()),
                ('source', models.CharField(help_text='The directory that the content was copied from.', max_length=512)),
                ('directory', models.CharField(help_text='The directory that workers read.', max_length=512)),
                ('is_current', models.BooleanField(default=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'ordering': ['adapter', '-number'],
            },
        ),
        migrations.AddField(
            model_name='adapter',
            name='options',
            field=models.JSONField(blank=True, default=dict, editable=False, help_text="What an API's client gave besides, to be returned to it."),
        ),
        migrations.AddField(
            model_name='adapter',
            name='workers',
            field=models.PositiveIntegerField(default=0, help_text='Workers of a deployment that load it before the first request; 0 is all. Others load it when they need it.'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='is_default_version',
            field=models.BooleanField(default=True, editable=False, help_text='Serves requests for the served name that give no version.'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='label',
            field=models.CharField(blank=True, editable=False, help_text="Which version of the served name it is; empty is the number of its model's version.", max_length=64),
        ),
        migrations.AddField(
            model_name='deployment',
            name='served_name',
            field=models.CharField(blank=True, editable=False, help_text='The name under which clients find it as one of several versions; empty is its own name.', max_length=128, validators=[django.core.validators.RegexValidator('^[A-Za-z0-9][A-Za-z0-9._/\\-]{0,127}$', "A name has 1 to 128 letters, digits, '.', '_', '-' or '/', and begins with a letter or digit.")]),
        ),
        migrations.AlterField(
            model_name='adapter',
            name='name',
            field=models.CharField(max_length=128, validators=[django.core.validators.RegexValidator('^[A-Za-z0-9][A-Za-z0-9._/\\-]{0,127}$', "A name has 1 to 128 letters, digits, '.', '_', '-' or '/', and begins with a letter or digit.")]),
        ),
        migrations.AddConstraint(
            model_name='adapter',
            constraint=models.UniqueConstraint(fields=('model', 'name'), name='one_adapter_per_name_and_model', violation_error_message='An adapter with this name exists.'),
        ),
        migrations.AddField(
            model_name='adapterversion',
            name='adapter',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='versions', to='management.adapter'),
        ),
        migrations.AddConstraint(
            model_name='adapterversion',
            constraint=models.UniqueConstraint(fields=('adapter', 'number'), name='one_row_per_adapter_version'),
        ),
        migrations.AddConstraint(
            model_name='adapterversion',
            constraint=models.UniqueConstraint(fields=('adapter', 'digest'), name='one_version_per_adapter_content'),
        ),
        migrations.AddConstraint(
            model_name='adapterversion',
            constraint=models.UniqueConstraint(condition=models.Q(('is_current', True)), fields=('adapter',), name='one_current_version_per_adapter'),
        ),
    ]
