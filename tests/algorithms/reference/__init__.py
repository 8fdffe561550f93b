"""Formulas of other frameworks that Strop itself does not use. The golden tests compare them with recorded numbers."""
