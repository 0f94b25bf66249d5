"""Names that other code already uses, on top of ferrule."""
