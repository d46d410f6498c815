"""Published silent parallelism bugs: where each is caught here, and by another type system."""
