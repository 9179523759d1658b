"""Policies that decide which blocks may enter the disk tier."""
