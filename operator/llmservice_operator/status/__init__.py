"""What a service is told: conditions, Events, the report, the last decisions."""
