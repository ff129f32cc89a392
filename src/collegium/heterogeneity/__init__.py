"""Differences between sites: distances, clusters, embeddings, spectra and the survey."""
