"""`llmservice calibrate`: the planner's latency model fitted to a running server."""
