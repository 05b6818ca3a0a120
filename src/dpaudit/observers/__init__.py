"""Audits of existing training code: one module per library, and one for any other step function."""
