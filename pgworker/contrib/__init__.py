"""Glue to optional packages, a module each; nothing here is imported before the package it serves is in use."""
