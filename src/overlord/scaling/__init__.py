"""How many loaders a source needs, and where: profiles of sources, and what is decided from them. Pure."""
