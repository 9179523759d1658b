"""How results are shown: numbers, tables, JSON and pictures."""
