"""The inner loops of the solver, one file per way of running them, and one dispatch."""
