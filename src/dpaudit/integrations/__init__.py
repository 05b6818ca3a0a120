"""Audits of trainers that call the training steps themselves.

``dpaudit.integrations.transformers`` is for the Trainer of Hugging Face, ``dpaudit.integrations.lightning``
for Lightning. With Accelerate, use ``dpaudit.opacus.observe`` around your loop.
"""
