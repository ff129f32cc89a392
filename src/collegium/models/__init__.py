"""Networks: building one by name, and the roles of its tensors."""
