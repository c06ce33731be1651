"""Regions: repeated blocks of a model, detected, extracted and matched, so that each compiles once."""
