"""Everything that happens around the step of an optimizer."""
