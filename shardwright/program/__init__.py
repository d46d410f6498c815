"""What a run computes and keeps: its configuration, its traced step, its stages and checkpoints.

shardwright.run runs it; shardwright.inspect, between the two, examines it before.
"""
