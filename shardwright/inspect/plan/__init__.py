"""What a training step will cost, of its traced program: time, memory, communication, by source line."""
