"""Discrete-event simulation of a service: the real scheduler and the real autoscaler against a latency model.

`replica` steps one engine, `fleet` runs the pods and the gateway, `policies` and `builtin` decide how many there are.
"""
