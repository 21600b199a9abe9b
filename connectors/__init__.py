"""Adapters between kvstore and the outside world: directories and transports.

Each adapter is found by entry point and imported on first use, so that importing this package
costs nothing and needs no third-party library. Adapters do not know one another.
"""
