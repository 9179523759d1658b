"""What `kvbm plan` asks and answers."""
