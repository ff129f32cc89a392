"""The vocabulary of algorithms: tensors, messages, model parts, data sets, random generators."""
