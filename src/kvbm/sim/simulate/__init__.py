"""What `kvbm simulate` asks and answers."""
