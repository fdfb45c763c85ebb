"""What rows may take next: each rule is one file here, see `constraint.Constraint`."""
