"""Audits of trainings that people already have: one module for each library, and one for everything else."""
