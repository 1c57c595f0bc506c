"""Models: where they come from, what their blocks are, and what each weight is multiplied with."""
