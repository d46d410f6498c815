"""Plants single faults in a copy of the source and records which tests fail."""
