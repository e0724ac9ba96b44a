"""The status of a service: conditions, Events, figures, decisions."""
