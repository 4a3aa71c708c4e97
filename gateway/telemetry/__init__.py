"""What the server says about itself: logs, metrics, and the lag of its loop."""
