"""Hugging Face policies and value models: loading, attention, adapters, checks of a family. Leaves out sharding."""
