"""What `kvbm scale` asks and answers: many nodes behind a router."""
