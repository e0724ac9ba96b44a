"""Who may write: the Lease, decided and held."""
