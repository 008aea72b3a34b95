"""The simulated accelerator and the tests that pin down what it does."""
