"""How many loaders a source needs, which process reads what, and when that changes: profiles,
partition, scaling. Pure: nothing here starts anything.
"""
