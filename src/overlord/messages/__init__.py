"""Messages between the components and processes of a job, as frozen values.

``control.py`` has the messages of the planner and of workers. ``data.py`` has those of loaders,
constructors and clients on the data path. ``launcher.py`` has those between coordinator, launcher
and session. Only ``StepPayload`` and ``StepMessage`` carry payload; all others carry ids and
metadata.
"""
