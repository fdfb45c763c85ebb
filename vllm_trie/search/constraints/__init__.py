"""Rules on what rows may take next, one file per rule; see `constraint.Constraint`."""
