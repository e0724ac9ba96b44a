"""What fits and how many: the planner's answer for a service, or the server's own."""
