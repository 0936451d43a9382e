"""What a leg does at a worker: its call and connection, retries, verdicts, releases, health, what is asked first."""
