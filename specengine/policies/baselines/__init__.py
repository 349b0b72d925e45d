"""Policies that `auto` and the papers' are compared with, one file each. They are found by name like all others."""
