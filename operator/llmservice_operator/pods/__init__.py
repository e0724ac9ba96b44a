"""What pods report: state, troubles, downloads and sizing."""
