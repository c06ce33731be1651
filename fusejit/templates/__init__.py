"""The kernel templates: the text of each beside its tiles."""
