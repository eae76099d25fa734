"""The way back after a fault: who is to be started anew, what was planned before, where to go on.
Pure: no clock, file, thread or runtime.

There is one recovery, whatever was lost: back to the last step that every rank has taken, and plan
again from the state behind it. Plans are a function of state and event log, so the same steps come
again, and whoever has one already ignores it.
"""
