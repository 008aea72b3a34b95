"""The contracts that a backend fulfils. Each file holds one; :mod:`devipc.spi` gathers them for vendors."""
