"""What an algorithm is written in: tensors, messages, model parts, data sets, random generators."""
