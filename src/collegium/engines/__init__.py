"""Engines: transports that carry requests to clients."""
