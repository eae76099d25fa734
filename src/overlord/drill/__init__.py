"""Fault drills: run a job undisturbed and again with killed workers, and compare the bytes."""
