"""Audits of models that other code has sharded."""
