"""Codecs: how tensors are made small before they travel; one module each."""
