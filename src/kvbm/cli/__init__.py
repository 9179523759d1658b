"""The `kvbm` command: one file per sub-command, imported only when it is called."""
