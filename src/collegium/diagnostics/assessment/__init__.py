"""How different the sites are, found out before any training: `collegium assess`."""
