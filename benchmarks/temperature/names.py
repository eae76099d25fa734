"""Names of the arms; without torch, so that a round starts at once."""

BALANCED, UNIFORM, MEAN, EMBED, PERMUTED, REVERSED = ARMS = (
    "balanced",
    "uniform",
    "uniform at the mean rate",
    "embeddings and head only",
    "permuted",
    "reversed",
)
