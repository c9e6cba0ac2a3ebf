"""Tests; folders whose file names come up elsewhere too are packages, so that pytest can tell them apart."""
