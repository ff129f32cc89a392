"""From an experiment file to jobs and their results."""
