"""Storage drivers: where bytes live below the device. They move and keep bytes and decide nothing else."""
