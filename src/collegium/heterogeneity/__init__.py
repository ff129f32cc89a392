"""How different sites are: distances, groups, embeddings and spectra. Pure functions."""
