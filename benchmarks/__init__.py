"""The budgets of the design, measured. Each module is a script: `python -m benchmarks.NAME`, from the checkout."""
