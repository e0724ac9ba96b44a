"""How a device computes: one interface, one package per kind of device."""
