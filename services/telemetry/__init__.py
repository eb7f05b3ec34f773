"""What is told of a running process: metrics and traces."""
