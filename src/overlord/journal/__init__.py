"""The journal of a job: a durable log of plans and events, from which a killed job resumes."""
