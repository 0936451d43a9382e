"""What the configuration file is made of beside ``coordinator.config``: sections, values, and how they are read."""
