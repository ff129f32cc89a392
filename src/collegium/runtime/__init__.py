"""Runs an algorithm: server, clients, engines, stored state and the ledger of what left a site."""
