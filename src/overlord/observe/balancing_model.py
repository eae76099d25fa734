"""The model by which a job is balanced, as text for explanations and tables."""

from __future__ import annotations

from overlord.job.job import Job


def shown_model(job: Job) -> str:
    """Return the model by which a job is balanced, as text; empty if its own strategy decides."""
    if job.model is None and not isinstance(job.strategy, str):
        return ""
    if job.model is None:
        return "a 12B Llama is assumed, since the job has none; set Job.model to balance by yours"
    images = any(getattr(t, "kind", "") == "images" for s in job.sources for t in s.transforms)
    if not images:
        return job.model.title
    encoder = job.model.encoder
    seen = "a ViT of 1B parameters is assumed; set encoder" if encoder is None else encoder.title
    return f"{job.model.title}; images: {seen}"
