"""Plants faults in runs, checkpoints, disks and ports, and checks that nothing is lost and nobody is let in."""
