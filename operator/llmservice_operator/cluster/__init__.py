"""Everything that talks to the API server: client, cache, applying children, leader election."""
