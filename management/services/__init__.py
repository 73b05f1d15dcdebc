"""The only code that writes desired state: functions that run one transaction each, with an audit event."""
