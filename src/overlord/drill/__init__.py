"""Fault drills: run a job undisturbed, run it again while workers are killed, compare the bytes."""
