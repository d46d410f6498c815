"""What only reads a step: its proof, its plan, statistics of its values, and its compiled operations by source line."""
