"""Local training: batches, the loop, objectives and Fisher information."""
