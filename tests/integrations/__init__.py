"""Arrays and tensors to shareable memory and back, on host memory that really is shared with the test."""
