"""The conformance suite on trial: backends that each lie once, and honest ones."""
