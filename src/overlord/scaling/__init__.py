"""How many processes read what, and when that changes. Pure: nothing here starts anything."""
