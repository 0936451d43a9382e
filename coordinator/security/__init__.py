"""Keys, secrets, certificates, and which addresses may be connected to."""
