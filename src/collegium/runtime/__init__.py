"""Runs of algorithms: server, clients, engines, stored states and the sites' ledgers."""
