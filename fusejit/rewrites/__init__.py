"""Rewrites: source to source, before anything is traced."""
