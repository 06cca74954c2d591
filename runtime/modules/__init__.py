"""Modules of others: what is done once they are loaded, and what of their memory is given back."""
