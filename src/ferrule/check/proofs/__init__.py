"""What holds for all sizes that a rule allows, by Z3."""
