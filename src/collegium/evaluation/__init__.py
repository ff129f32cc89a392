"""Comparing methods: paired differences, worst site, disparity, tables."""
