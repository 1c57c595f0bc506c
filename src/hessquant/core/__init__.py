"""Pure functions on tensors. They know no model, disk or logging, and never change what they are given."""
