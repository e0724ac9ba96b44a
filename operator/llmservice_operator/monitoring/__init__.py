"""The operator's metrics, the alerts, and PromQL."""
