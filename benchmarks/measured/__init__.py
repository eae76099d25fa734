"""The README's "Measured" table: its rows by name, and the result pages that hold their numbers."""
