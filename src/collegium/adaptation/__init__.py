"""Adapting models to a site outside the federation, from its unlabelled images alone."""
