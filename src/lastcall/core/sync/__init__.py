"""What threads share: the latch that holds a notice, the gate around optimizer steps, the exception that ends
a wait."""
